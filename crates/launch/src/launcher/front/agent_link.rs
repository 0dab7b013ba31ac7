//! The front's line to one agent: commands go out, reports and output come in.

use std::io::{BufRead, BufReader, Read, Write, stderr};
use std::net::{Shutdown, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::Event;
use super::labelled_output::LabelledOutput;
use super::rank_outputs::RankOutputs;
use crate::launcher::agent::ALIVE_INTERVAL;
use crate::launcher::agent_command;
use crate::launcher::layout::Host;
use crate::launcher::wire::{self, Command, GREETING, Report, Stream};
use crate::{Error, Result};

/// How long an agent that closed its stdout may take to end.
pub(super) const EXIT_WAIT: Duration = Duration::from_secs(5);
/// A longer line of a remote shell's greeting is shown in parts.
const MAX_GREETING: u64 = 1 << 16;
/// How long its stderr may stay open after that.
const NOTICES_WAIT: Duration = Duration::from_secs(1);

/// An agent that was started.
pub(super) struct AgentLink {
    commands: Option<Sender<Command>>,
    way: Way,
    waiting_since: WaitingSince,
}

/// What lies between the front and an agent.
enum Way {
    /// The agent's process here, or that of ssh; its group has the same number.
    Process(Pid),
    /// The agent has called.
    Call(TcpStream),
}

/// Since when the reader has waited for a report; none while it prints.
type WaitingSince = Arc<Mutex<Option<Instant>>>;

impl AgentLink {
    /// Starts the agent of host number `index`; what it reports becomes events.
    pub(super) fn start(
        index: usize,
        host: &Host,
        outputs: RankOutputs,
        events: &Sender<Event>,
    ) -> Result<Self> {
        let words = agent_command::words(host);
        let mut child = std::process::Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A terminal's Ctrl-C is for the front, which passes it on.
            .process_group(0)
            .spawn()
            .map_err(|error| Error::Launch(format!("cannot run {:?}: {error}", words[0])))?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::Launch("an agent has no pipes".to_string()));
        };
        let way = Way::Process(pid_of(&child));
        let notices = show_notices(stderr, format!("[host {}] ", host.name));
        let end = move |is_broken| end_of(child, notices, is_broken);
        let reader = Reader::new(index, host, outputs, events);
        Ok(Self::new(way, host, reader, (stdin, stdout), end))
    }

    /// The link to an agent that has called.
    ///
    /// # Errors
    /// The connection cannot be used in both directions.
    pub(super) fn called(
        (index, stream): (usize, TcpStream),
        host: &Host,
        outputs: RankOutputs,
        events: &Sender<Event>,
    ) -> Result<Self> {
        let clone = || {
            let cloned = stream.try_clone();
            cloned.map_err(|error| Error::Launch(format!("a connection to an agent: {error}")))
        };
        let (input, output) = (clone()?, clone()?);
        let reader = Reader::new(index, host, outputs, events);
        let end = |_| (None, Vec::new());
        let way = Way::Call(stream);
        Ok(Self::new(way, host, reader, (input, output), end))
    }

    fn new(
        way: Way,
        host: &Host,
        reader: Reader,
        (input, output): (impl Write + Send + 'static, impl Read + Send + 'static),
        end: impl FnOnce(bool) -> (Option<String>, Vec<String>) + Send + 'static,
    ) -> Self {
        let (commands, to_send) = mpsc::channel();
        write_commands(input, to_send);
        let waiting_since = reader.waiting_since.clone();
        std::thread::spawn(move || reader.run(output, end));
        let link = Self {
            commands: Some(commands),
            way,
            waiting_since,
        };
        link.send(Command::Plan(host.plan.clone()));
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
        if let Way::Call(stream) = &self.way {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }

    /// Kills the agent's process on this host, or cuts it off.
    pub(super) fn kill(&self) {
        let _ = match &self.way {
            Way::Process(pid) => killpg(*pid, Signal::SIGKILL).is_ok(),
            Way::Call(stream) => stream.shutdown(Shutdown::Both).is_ok(),
        };
    }

    /// How long nothing has been heard.
    pub(super) fn silence(&self) -> Duration {
        let since = *lock(&self.waiting_since);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

fn lock(waiting_since: &WaitingSince) -> std::sync::MutexGuard<'_, Option<Instant>> {
    waiting_since.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes commands, and that the front lives, until the link is closed. A thread, since a cut line may block the pipe.
fn write_commands(mut stdin: impl Write + Send + 'static, commands: mpsc::Receiver<Command>) {
    std::thread::spawn(move || {
        loop {
            let command = match commands.recv_timeout(ALIVE_INTERVAL) {
                Ok(command) => command,
                Err(RecvTimeoutError::Timeout) => Command::Alive,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if wire::send(&mut stdin, &command, &[]).is_err() {
                return;
            }
        }
    });
}

/// Shows what a process on the way says; the thread returns the last lines.
pub(super) fn show_notices(
    mut from: impl Read + Send + 'static,
    label: String,
) -> JoinHandle<Vec<String>> {
    std::thread::spawn(move || {
        let mut notices = LabelledOutput::new(label, Stream::Err, None);
        let mut buffer = [0; 4096];
        while let Ok(num_bytes @ 1..) = from.read(&mut buffer) {
            let _ = notices.write(&buffer[..num_bytes]);
        }
        notices.flush();
        notices.last_lines()
    })
}

/// The number of a process, which is that of its group.
pub(super) fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(-1))
}

/// How an agent's process here ended, and what it last said.
fn end_of(
    mut child: Child,
    notices: JoinHandle<Vec<String>>,
    is_broken: bool,
) -> (Option<String>, Vec<String>) {
    if is_broken {
        let _ = child.kill();
    }
    let ended = match wait_or_kill(&mut child) {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    };
    // Its stderr may be held open by others than the agent; then its last lines are not worth the wait.
    let in_time = poll(NOTICES_WAIT, || notices.is_finished().then_some(()));
    let last_lines = match in_time {
        Some(()) => notices.join().unwrap_or_default(),
        None => Vec::new(),
    };
    (Some(ended), last_lines)
}

/// Waits for a process that has closed its stdout and should end.
fn wait_or_kill(child: &mut Child) -> std::io::Result<ExitStatus> {
    let ended = poll(EXIT_WAIT, || child.try_wait().transpose());
    ended.unwrap_or_else(|| {
        child.kill()?;
        child.wait()
    })
}

/// Asks until there is an answer, or for that long.
pub(super) fn poll<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    loop {
        let answer = ask();
        if answer.is_some() || begin.elapsed() > limit {
            return answer;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Reader {
    index: usize,
    name: String,
    outputs: RankOutputs,
    events: Sender<Event>,
    waiting_since: WaitingSince,
}

impl Reader {
    fn new(index: usize, host: &Host, outputs: RankOutputs, events: &Sender<Event>) -> Self {
        Self {
            index,
            name: host.name.clone(),
            outputs,
            events: events.clone(),
            waiting_since: WaitingSince::default(),
        }
    }

    /// Reads until the stream ends; `end` then says what became of the way to the agent, given whether something was wrong.
    fn run(mut self, from: impl Read, end: impl FnOnce(bool) -> (Option<String>, Vec<String>)) {
        let mut from = BufReader::new(from);
        let problem = match self.greeted(&mut from) {
            Ok(()) => self.pass_on_reports(&mut from),
            Err(problem) => Some(problem),
        };
        let (ended, last_lines) = end(problem.is_some());
        let problem = problem.unwrap_or_else(|| "the connection to its agent ended".to_string());
        let detail = match ended {
            Some(ended) => format!("{problem} ({ended})"),
            None => problem,
        };
        self.tell(Event::Gone {
            host: self.index,
            detail,
            last_lines,
        });
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

    /// Until the end of the stream; returns what was wrong with it, if anything was.
    fn pass_on_reports(&mut self, from: &mut impl BufRead) -> Option<String> {
        loop {
            *lock(&self.waiting_since) = Some(Instant::now());
            let report = wire::receive(from);
            *lock(&self.waiting_since) = None;
            match report {
                Ok(None) => return None,
                Ok(Some(Report::Output {
                    rank,
                    stream,
                    num_bytes,
                })) => {
                    let bytes = match wire::receive_bytes(from, num_bytes) {
                        Ok(bytes) => bytes,
                        Err(error) => {
                            return Some(format!("the agent's output breaks off: {error}"));
                        }
                    };
                    if let Some(warning) = self.outputs.write(rank, stream, &bytes) {
                        let _ = writeln!(stderr(), "candle-train: {warning}");
                    }
                }
                Ok(Some(Report::Ended {
                    rank,
                    pid,
                    end,
                    ms_ago,
                })) => {
                    let now = Instant::now();
                    let ended_at = now
                        .checked_sub(Duration::from_millis(ms_ago))
                        .unwrap_or(now);
                    let last_lines = self.outputs.end(rank);
                    self.tell(Event::Ended(super::RankEnd {
                        host: self.index,
                        rank,
                        pid,
                        end,
                        ended_at,
                        last_lines,
                    }));
                }
                Ok(Some(report)) => self.tell(Event::Report(self.index, report)),
                Err(error) => {
                    return Some(format!("the agent's answer is not understood: {error}"));
                }
            }
        }
    }

    fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}
