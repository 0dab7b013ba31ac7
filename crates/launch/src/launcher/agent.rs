//! The agent: starts the ranks of one host, sends their output to the front, and ends when all below it is gone.
//!
//! It reads [`Command`]s on stdin and writes [`Report`]s on stdout, so it does not matter what lies between it and the
//! front: a socket, or ssh. The end of stdin means that the front is gone, whatever the reason.

mod rank;

use std::io::{BufReader, ErrorKind, Write, stdin, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{dup2_stdin, dup2_stdout};

use super::call::{Caller, call_as_told};
use super::end::End;
use super::host_plan::HostPlan;
use super::say::say;
use super::wire::{self, ALIVE_INTERVAL, Command, GREETING, Report};
use super::{process_tree, program, signals, thread};
use crate::{Error, RankEnv, Result};
use rank::Rank;
pub use rank::become_rank;

/// Processes that outlive all ranks of the host have this long after SIGTERM.
const LEFTOVER_GRACE: Duration = Duration::from_secs(1);
/// How long the front may take to say what to run, which it does at once.
const PLAN_DEADLINE: Duration = Duration::from_secs(60);
/// The time between two looks at outputs of ranks that have ended.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(10);

/// What the agent's main thread hears from its others.
enum AgentEvent {
    Command(Command),
    FrontGone,
    /// The front cannot be understood any more, for this reason.
    Unknown(String),
    Ended(WaitStatus),
    /// There is no process below the agent any more.
    NobodyLeft,
}

/// Runs an agent: on this process's stdin and stdout, or of the one rank as which MPI has started it, on a connection to the front
/// at `HOST:PORT`.
pub fn run_agent(front: Option<&str>) -> ExitCode {
    if let Some(front) = front
        && let Err(error) = call_front(front)
    {
        say(&format!(
            "the agent cannot reach the launcher: {front}: {error}"
        ));
        return ExitCode::FAILURE;
    }
    let (sender, events) = mpsc::channel();
    let on_signal = sender.clone();
    let watched = signals::watch(move |_| drop(on_signal.send(AgentEvent::FrontGone)));
    // Errors of its stdout mean that the front is gone, and the end of stdin says that too.
    let _ = writeln!(stdout(), "{GREETING}");
    let (reports, posted) = mpsc::channel();
    let writer = thread::start(move || wire::write_posts(stdout(), &posted, &Report::Alive));
    let (last, code) = match watched.and_then(|()| run(sender, &events, &reports)) {
        Ok(()) => (Report::Finished, ExitCode::SUCCESS),
        Err(error) => (Report::Refused(error.to_string()), ExitCode::FAILURE),
    };
    let _ = reports.send(last);
    // Then the thread that writes ends with that report.
    drop(reports);
    let _ = writer.join();
    code
}

/// Puts a connection to the front in the place of stdin and stdout.
fn call_front(front: &str) -> std::io::Result<()> {
    let rank = RankEnv::from_env().map_err(std::io::Error::other)?.rank();
    let stream = call_as_told(front, &Caller::Rank(rank))?.stream;
    dup2_stdin(&stream)?;
    Ok(dup2_stdout(&stream)?)
}

fn run(
    sender: Sender<AgentEvent>,
    events: &Receiver<AgentEvent>,
    reports: &Sender<Report>,
) -> Result<()> {
    process_tree::adopt_orphans()?;
    read_commands(sender.clone());
    let Some(Command::Plan(plan)) = next_command(events, PLAN_DEADLINE)? else {
        return Ok(());
    };
    check(&plan)?;
    let _ = reports.send(Report::Ready);
    // A front on this host may be suspended; its end is seen.
    let silence = plan.silence_ms.map_or(Duration::MAX, Duration::from_millis);
    if !matches!(next_command(events, silence)?, Some(Command::Start)) {
        return Ok(());
    }
    // By the main thread: the kernel kills ranks when the thread that started them ends.
    let ranks = (0..plan.num_ranks).map(|local_rank| Rank::start(&plan, local_rank));
    let ranks = ranks.collect::<Result<_>>()?;
    wait_for_children(sender);
    let agent = Agent {
        plan,
        reports,
        ranks,
        kill_at: None,
        killing_since: None,
    };
    agent.run(events);
    Ok(())
}

/// The front's next command; `None` if it is gone, or says nothing for so long.
fn next_command(events: &Receiver<AgentEvent>, silence: Duration) -> Result<Option<Command>> {
    loop {
        match events.recv_timeout(silence) {
            // Other hosts take their time.
            Ok(AgentEvent::Command(Command::Alive)) => {}
            Ok(AgentEvent::Command(command)) => return Ok(Some(command)),
            Ok(AgentEvent::Unknown(why)) => return Err(Error::Launch(why)),
            _ => return Ok(None),
        }
    }
}

/// Whether the plan can be run here, in its folder.
fn check(plan: &HostPlan) -> Result<()> {
    let folder = Path::new(&plan.folder);
    std::env::set_current_dir(folder).map_err(|error| {
        Error::Launch(format!(
            "cannot work in folder {}: {error}\nhint: a run needs the same folder on all hosts",
            plan.folder
        ))
    })?;
    program::find(&plan.program, folder).map(drop)
}

fn read_commands(events: Sender<AgentEvent>) {
    thread::start(move || {
        let mut input = BufReader::new(stdin());
        loop {
            let event = match wire::receive(&mut input) {
                Ok(Some((command, _))) => AgentEvent::Command(command),
                Ok(None) => AgentEvent::FrontGone,
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    AgentEvent::Unknown(format!(
                        "its agent does not understand the launcher: {error}\nhint: a run needs the same candle-train on all hosts"
                    ))
                }
                Err(error) => {
                    AgentEvent::Unknown(format!("its agent cannot hear the launcher: {error}"))
                }
            };
            let is_last = !matches!(event, AgentEvent::Command(_));
            if events.send(event).is_err() || is_last {
                return;
            }
        }
    });
}

/// Collects the ends of all children, among them the orphans that this subreaper inherits.
fn wait_for_children(events: Sender<AgentEvent>) {
    thread::start(move || {
        loop {
            let sent = match waitpid(None, None) {
                Ok(status) => events.send(AgentEvent::Ended(status)),
                Err(Errno::EINTR) => continue,
                Err(_) => return drop(events.send(AgentEvent::NobodyLeft)),
            };
            if sent.is_err() {
                return;
            }
        }
    });
}

struct Agent<'a> {
    plan: HostPlan,
    reports: &'a Sender<Report>,
    ranks: Vec<Rank>,
    kill_at: Option<Instant>,
    killing_since: Option<Instant>,
}

impl Agent<'_> {
    fn run(mut self, events: &Receiver<AgentEvent>) {
        let silence = self.plan.silence_ms.map(Duration::from_millis);
        let mut front_heard_at = Instant::now();
        let mut nobody_left = false;
        loop {
            let mut front_gone = false;
            match events.recv_timeout(self.next_wait()) {
                Ok(AgentEvent::Command(command)) => {
                    front_heard_at = Instant::now();
                    self.obey(command);
                }
                Ok(AgentEvent::FrontGone) => front_gone = true,
                Ok(AgentEvent::Unknown(why)) => {
                    let _ = self.reports.send(Report::Refused(why));
                    front_gone = true;
                }
                Ok(AgentEvent::Ended(status)) => self.note_end(status),
                Ok(AgentEvent::NobodyLeft) => nobody_left = true,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if front_gone || silence.is_some_and(|limit| front_heard_at.elapsed() > limit) {
                self.stop(Duration::from_millis(self.plan.grace_ms));
                front_heard_at = Instant::now();
            }
            for rank in &mut self.ranks {
                rank.report_end(self.reports);
            }
            if nobody_left && self.ranks.iter().all(|rank| rank.is_reported) {
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
                    self.signal(signal);
                }
            }
            Command::Stop { grace_ms } => self.stop(Duration::from_millis(grace_ms)),
            Command::Alive | Command::Start | Command::Plan(_) => {}
        }
    }

    fn signal(&self, signal: Signal) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }

    /// Asks the ranks to end, and kills what is left after the grace time.
    fn stop(&mut self, grace: Duration) {
        self.signal(Signal::SIGTERM);
        // One that was suspended has to run to end.
        self.signal(Signal::SIGCONT);
        self.kill_within(grace);
    }

    fn kill_within(&mut self, grace: Duration) {
        let at = Instant::now() + grace;
        self.kill_at = Some(self.kill_at.map_or(at, |earlier| earlier.min(at)));
    }

    fn note_end(&mut self, status: WaitStatus) {
        let (Some(pid), Some(end)) = (status.pid(), End::of(status)) else {
            return;
        };
        let mut running = self.ranks.iter_mut().filter(|rank| rank.ended.is_none());
        if let Some(rank) = running.find(|rank| rank.pid == pid) {
            rank.ended = Some((end, Instant::now()));
            if self.ranks.iter().all(|rank| rank.ended.is_some()) {
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
            let _ = self.reports.send(Report::Survivors(pids));
            return false;
        }
        self.kill_at = Some(Instant::now() + process_tree::KILL_INTERVAL);
        true
    }

    fn next_wait(&self) -> Duration {
        let is_waited_for = |rank: &Rank| rank.ended.is_some() && !rank.is_reported;
        let wait = match self.ranks.iter().any(is_waited_for) {
            true => OUTPUT_INTERVAL,
            false => ALIVE_INTERVAL,
        };
        let to_kill = |at: Instant| wait.min(at.saturating_duration_since(Instant::now()));
        self.kill_at.map_or(wait, to_kill)
    }
}
