//! The agent: starts the ranks of one host, sends their output to the front, and ends when all below it is gone.
//!
//! It reads [`Command`]s on stdin and writes [`Report`]s on stdout, so it does not matter what lies between it and the
//! front: a pipe, or ssh. The end of stdin means that the front is gone, whatever the reason.

mod ranks;
mod report_pipe;

use std::io::{BufReader, stdin};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{dup2_stdin, dup2_stdout};

use super::call::{Caller, call};
use super::end::End;
use super::host_plan::HostPlan;
use super::wire::{self, Command, Report};
use super::{process_tree, program, signals};
use crate::rank_env::given_secret;
use crate::{Error, RankEnv, Result};
use ranks::Ranks;
use report_pipe::ReportPipe;

/// Processes that outlive all ranks of the host have this long after SIGTERM.
const LEFTOVER_GRACE: Duration = Duration::from_secs(1);
/// How often each side says that it lives.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// What the agent's main thread hears from its others.
pub(super) enum Event {
    Command(Command),
    FrontGone,
    Ended(WaitStatus),
    /// There is no process below the agent any more.
    NobodyLeft,
    /// A rank's output ended.
    OutputEnded {
        local_rank: usize,
    },
}

/// Runs an agent: on this process's stdin and stdout, or of the one rank as which MPI has started it, on a connection to the front
/// at `HOST:PORT`.
pub fn run_agent(front: Option<&str>) -> ExitCode {
    if let Some(Err(error)) = front.map(call_front) {
        eprintln!("candle-train: the agent cannot reach the launcher: {error}");
        return ExitCode::FAILURE;
    }
    // Before any thread is started: they all inherit it.
    let signals = signals::block();
    let (reports, writer) = ReportPipe::open();
    let (last, code) = match signals.and_then(|signals| agent(signals, &reports)) {
        Ok(()) => (Report::Finished, ExitCode::SUCCESS),
        Err(error) => (Report::Refused(error.to_string()), ExitCode::FAILURE),
    };
    reports.post(last);
    // It ends with that report.
    let _ = writer.join();
    code
}

/// Puts a connection to the front in the place of stdin and stdout.
fn call_front(front: &str) -> Result<()> {
    let secret = given_secret()?.ok_or_else(|| Error::Launch("it has no secret".to_string()))?;
    let caller = Caller::Rank(RankEnv::from_env()?.rank());
    let connected = call(front, &secret, &caller).and_then(|call| {
        dup2_stdin(&call.stream)?;
        Ok(dup2_stdout(&call.stream)?)
    });
    connected.map_err(|error| Error::Launch(format!("{front}: {error}")))
}

fn agent(signals: SigSet, reports: &ReportPipe) -> Result<()> {
    set_child_subreaper(true)
        .map_err(|errno| Error::Launch(format!("cannot become a subreaper: {errno}")))?;
    let (sender, events) = mpsc::channel();
    read_commands(sender.clone());
    let on_signal = sender.clone();
    signals::watch(signals, move |_| {
        let _ = on_signal.send(Event::FrontGone);
    });
    let Some(plan) = await_plan(&events)? else {
        return Ok(());
    };
    reports.post(Report::Ready);
    if !matches!(events.recv(), Ok(Event::Command(Command::Start))) {
        return Ok(());
    }
    // By the main thread: the kernel kills ranks when the thread that started them ends.
    let ranks = Ranks::start(&plan, reports, &sender)?;
    wait_for_children(sender);
    Agent {
        plan,
        reports,
        ranks,
        kill_at: None,
        killing_since: None,
    }
    .run(&events);
    Ok(())
}

/// The plan, checked; `None` if the front is gone before.
fn await_plan(events: &Receiver<Event>) -> Result<Option<HostPlan>> {
    let Ok(Event::Command(Command::Plan(plan))) = events.recv() else {
        return Ok(None);
    };
    let folder = Path::new(&plan.folder);
    std::env::set_current_dir(folder).map_err(|error| {
        Error::Launch(format!(
            "cannot work in folder {}: {error}\nhint: a run needs the same folder on all hosts",
            plan.folder
        ))
    })?;
    let search_path = std::env::var("PATH").unwrap_or_default();
    program::find(&plan.program, folder, &search_path)?;
    Ok(Some(plan))
}

fn read_commands(events: Sender<Event>) {
    std::thread::spawn(move || {
        let mut input = BufReader::new(stdin());
        while let Ok(Some(command)) = wire::receive(&mut input) {
            if events.send(Event::Command(command)).is_err() {
                return;
            }
        }
        let _ = events.send(Event::FrontGone);
    });
}

/// Collects the ends of all children, among them the orphans that this subreaper inherits.
fn wait_for_children(events: Sender<Event>) {
    std::thread::spawn(move || {
        loop {
            let event = match waitpid(None, None) {
                Ok(status) => Event::Ended(status),
                Err(Errno::EINTR) => continue,
                Err(_) => Event::NobodyLeft,
            };
            let is_last = matches!(event, Event::NobodyLeft);
            if events.send(event).is_err() || is_last {
                return;
            }
        }
    });
}

struct Agent<'a> {
    plan: HostPlan,
    reports: &'a ReportPipe,
    ranks: Ranks,
    kill_at: Option<Instant>,
    killing_since: Option<Instant>,
}

impl Agent<'_> {
    fn run(&mut self, events: &Receiver<Event>) {
        let mut front_heard_at = Instant::now();
        let mut front_gone = false;
        let mut nobody_left = false;
        loop {
            match events.recv_timeout(self.next_wait()) {
                Ok(Event::Command(command)) => {
                    front_heard_at = Instant::now();
                    self.obey(command);
                }
                Ok(Event::FrontGone) => front_gone = true,
                Ok(Event::Ended(status)) => self.note_end(status),
                Ok(Event::NobodyLeft) => nobody_left = true,
                Ok(Event::OutputEnded { local_rank }) => self.ranks.note_output_end(local_rank),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let silence = self.plan.silence_ms.map(Duration::from_millis);
            if front_gone || silence.is_some_and(|limit| front_heard_at.elapsed() > limit) {
                front_gone = false;
                self.stop(Duration::from_millis(self.plan.grace_ms));
                front_heard_at = Instant::now();
            }
            self.ranks.report_ends(self.reports);
            if nobody_left && self.ranks.all_reported() {
                return;
            }
            if self.kill_at.is_some_and(|at| Instant::now() >= at) && !self.kill_once() {
                return;
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Signal(number) => {
                if let Ok(signal) = Signal::try_from(number) {
                    self.ranks.signal(signal);
                }
            }
            Command::Stop { grace_ms } => self.stop(Duration::from_millis(grace_ms)),
            Command::Alive | Command::Start | Command::Plan(_) => {}
        }
    }

    /// Asks the ranks to end, and kills what is left after the grace time.
    fn stop(&mut self, grace: Duration) {
        self.ranks.signal(Signal::SIGTERM);
        // One that was suspended has to run to end.
        self.ranks.signal(Signal::SIGCONT);
        self.kill_within(grace);
    }

    fn kill_within(&mut self, grace: Duration) {
        let at = Instant::now() + grace;
        self.kill_at = Some(self.kill_at.map_or(at, |earlier| earlier.min(at)));
    }

    fn note_end(&mut self, status: WaitStatus) {
        if let (Some(pid), Some(end)) = (status.pid(), End::of(status)) {
            let was_running = self.ranks.any_running();
            self.ranks.note_end(pid, end);
            if was_running && !self.ranks.any_running() {
                process_tree::signal_descendants(Signal::SIGTERM);
                self.kill_within(LEFTOVER_GRACE);
            }
        }
    }

    /// Kills all that is left; false if that has been tried for too long.
    fn kill_once(&mut self) -> bool {
        let since = *self.killing_since.get_or_insert_with(Instant::now);
        let found = process_tree::signal_descendants(Signal::SIGKILL);
        if !found.is_empty() && since.elapsed() > process_tree::KILL_DEADLINE {
            let pids = found.iter().map(|pid| pid.as_raw()).collect();
            self.reports.post(Report::Survivors(pids));
            return false;
        }
        self.kill_at = Some(Instant::now() + process_tree::KILL_INTERVAL);
        true
    }

    fn next_wait(&self) -> Duration {
        let mut wait = ALIVE_INTERVAL;
        if let Some(at) = self.kill_at {
            wait = wait.min(at.saturating_duration_since(Instant::now()));
        }
        match self.ranks.next_report_at() {
            Some(at) => wait.min(at.saturating_duration_since(Instant::now())),
            None => wait,
        }
    }
}
