//! The front's line to one agent: commands go out, reports and output come in.

use std::io::{BufRead, BufReader, Read, Write, stderr};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::labelled_output::{LabelledOutput, RankOutputs};
use super::process::Process;
use super::verdict::{HostLoss, RankEnd};
use super::{FrontEvent, say};
use crate::launcher::config::secret_variable;
use crate::launcher::host_plan::HostPlan;
use crate::launcher::thread;
use crate::launcher::wire::{self, Command, GREETING, Report};
use crate::lock::lock;
use crate::{Error, Result};

/// How long an agent that closed its stdout may take to end.
pub(super) const EXIT_WAIT: Duration = Duration::from_secs(5);
/// A longer line of a remote shell's greeting is shown in parts.
const MAX_GREETING: u64 = 1 << 16;

/// The front's line to one agent.
pub(super) struct AgentLink {
    commands: Option<Sender<Command>>,
    stream: Arc<UnixStream>,
    /// The agent's process here, or that of ssh, unless it has called; its group has the same number.
    process: Option<Pid>,
    waiting_since: WaitingSince,
}

/// Since when the reader has waited for a report; none while it prints.
type WaitingSince = Arc<Mutex<Option<Instant>>>;

impl AgentLink {
    /// Starts the agent of host number `index`; what it reports becomes events.
    pub(super) fn start(
        index: usize,
        plan: &HostPlan,
        outputs: RankOutputs,
        events: &Sender<FrontEvent>,
    ) -> Result<Self> {
        let no_line = |error| Error::Launch(format!("no line to an agent: {error}"));
        let (stream, other_end) = UnixStream::pair().map_err(no_line)?;
        let clone = other_end.try_clone().map_err(no_line)?;
        let words = plan.agent_words();
        let mut command = std::process::Command::new(&words[0]);
        command
            .args(&words[1..])
            .envs(secret_variable(plan.short_secret))
            .stdin(OwnedFd::from(clone))
            .stdout(OwnedFd::from(other_end));
        let process = Process::start(&mut command, &format!("[host {}] ", plan.host))?;
        Ok(Self::new(
            index,
            plan,
            outputs,
            (stream, Some(process)),
            events,
        ))
    }

    /// The line to the agent of host number `index`, with the process that it ends in, if that is here; what it reports becomes events.
    pub(super) fn new(
        index: usize,
        plan: &HostPlan,
        outputs: RankOutputs,
        (stream, process): (UnixStream, Option<Process>),
        events: &Sender<FrontEvent>,
    ) -> Self {
        let (commands, to_send) = mpsc::channel();
        let (stream, waiting_since) = (Arc::new(stream), WaitingSince::default());
        let link = Self {
            commands: Some(commands),
            stream: stream.clone(),
            process: process.as_ref().map(Process::pid),
            waiting_since: waiting_since.clone(),
        };
        let reader = Reader {
            index,
            name: plan.host.clone(),
            first_rank: plan.first_rank,
            outputs,
            log_failed: false,
            events: events.clone(),
            waiting_since,
        };
        let input = stream.clone();
        thread::start(move || reader.run(&*input, process));
        // Another thread, since a cut line may block.
        thread::start(move || {
            wire::write_posts(&*stream, &to_send, &Command::Alive);
            let _ = stream.shutdown(Shutdown::Write);
        });
        link.send(Command::Plan(plan.clone()));
        link
    }

    pub(super) fn send(&self, command: Command) {
        if let Some(commands) = &self.commands {
            let _ = commands.send(command);
        }
    }

    /// Hangs up: the agent ends what it started, and itself.
    pub(super) fn close(&mut self) {
        self.commands = None;
    }

    /// Cuts the agent off, and kills its process on this host.
    pub(super) fn kill(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(pid) = self.process {
            let _ = killpg(pid, Signal::SIGKILL);
        }
    }

    /// How long nothing has been heard.
    pub(super) fn silence(&self) -> Duration {
        let since = *lock(&self.waiting_since);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// What reads an agent's side.
struct Reader {
    index: usize,
    name: String,
    first_rank: usize,
    outputs: RankOutputs,
    log_failed: bool,
    events: Sender<FrontEvent>,
    waiting_since: WaitingSince,
}

impl Reader {
    /// Reads until the stream ends.
    fn run(mut self, from: impl Read, process: Option<Process>) {
        let mut from = BufReader::new(from);
        let read = self
            .greeted(&mut from)
            .and_then(|()| self.pass_on_reports(&mut from));
        // If something is wrong with what it says, it need not end.
        let limit = read.as_ref().map_or(Duration::ZERO, |()| EXIT_WAIT);
        let ended = process.map(|process| process.end(Some(limit)));
        let (ended, last_lines) = ended.unzip();
        let problem = read.err();
        let problem = problem.unwrap_or_else(|| "the connection to its agent ended".to_string());
        let detail = match ended {
            Some(ended) => format!("{problem} ({ended})"),
            None => problem,
        };
        self.tell(FrontEvent::Gone(HostLoss {
            last_lines: last_lines.unwrap_or_default(),
            ..HostLoss::now(self.index, detail)
        }));
    }

    /// Skips what a remote shell says before the agent's first line.
    fn greeted(&self, from: &mut impl BufRead) -> std::result::Result<(), String> {
        loop {
            let mut line = Vec::new();
            let read = from.take(MAX_GREETING).read_until(b'\n', &mut line);
            if read.map_or(true, |num_bytes| num_bytes == 0) {
                return Err("the connection ended before the agent answered".to_string());
            }
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end();
            if line == GREETING {
                return Ok(());
            }
            if line.starts_with("candle-train agent ") {
                return Err(format!("it runs {line:?}, this is {GREETING:?}"));
            }
            let _ = writeln!(stderr(), "[host {}] {line}", self.name);
        }
    }

    /// Until the end of the stream, or something in it that is wrong.
    fn pass_on_reports(&mut self, from: &mut impl Read) -> std::result::Result<(), String> {
        loop {
            *lock(&self.waiting_since) = Some(Instant::now());
            let received = wire::receive(from);
            *lock(&self.waiting_since) = None;
            let not_understood = |error| format!("the agent's answer is not understood: {error}");
            let Some((report, bytes)) = received.map_err(not_understood)? else {
                return Ok(());
            };
            match report {
                Report::Output { rank, stream } => {
                    let outputs = self.of(rank);
                    let written = outputs.map(|pair| pair[stream as usize].write(&bytes));
                    if let (Some(Err(error)), false) = (written, self.log_failed) {
                        self.log_failed = true;
                        say(&format!("cannot write the log of rank {rank}: {error}"));
                    }
                }
                Report::Ended {
                    rank,
                    pid,
                    end,
                    ms_ago,
                } => {
                    let now = Instant::now();
                    let ended_at = now.checked_sub(Duration::from_millis(ms_ago));
                    let last_lines = self.of(rank).map(|[out, err]| {
                        out.flush();
                        err.flush();
                        err.last_lines()
                    });
                    self.tell(FrontEvent::Ended(RankEnd {
                        host: self.index,
                        rank,
                        pid,
                        end,
                        ended_at: ended_at.unwrap_or(now),
                        last_lines: last_lines.unwrap_or_default(),
                    }));
                }
                report => self.tell(FrontEvent::Report(self.index, report)),
            }
        }
    }

    fn of(&mut self, rank: usize) -> Option<&mut [LabelledOutput; 2]> {
        self.outputs.get_mut(rank.checked_sub(self.first_rank)?)
    }

    fn tell(&self, event: FrontEvent) {
        let _ = self.events.send(event);
    }
}
