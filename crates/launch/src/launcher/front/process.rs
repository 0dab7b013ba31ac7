//! A process on the way to agents: one of these, ssh, or an MPI library's launcher.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use super::labelled_output::LabelledOutput;
use crate::launcher::program::pid_of;
use crate::launcher::thread;
use crate::launcher::wire::Stream;
use crate::limits::at_limit;
use crate::{Error, Result};

/// How long what such a process says may stay open after its end.
const NOTICES_WAIT: Duration = Duration::from_secs(1);

/// A process on the way to agents.
pub(super) struct Process {
    child: Child,
    /// They show what it says, and return the last lines; the last one is that of its stderr.
    notices: Vec<JoinHandle<Vec<String>>>,
}

impl Process {
    /// Starts it, in a group of its own: a terminal's Ctrl-C is for the front, which passes it on. What it says is shown behind a label.
    pub(super) fn start(command: &mut Command, label: &str) -> Result<Self> {
        let started = command.stderr(Stdio::piped()).process_group(0).spawn();
        let mut child = started.map_err(|error| {
            let program = command.get_program();
            Error::Launch(format!("cannot run {program:?}: {}", at_limit(&error)))
        })?;
        let out = child.stdout.take().map(|pipe| show_notices(pipe, label));
        let err = child.stderr.take().map(|pipe| show_notices(pipe, label));
        let notices = out.into_iter().chain(err).collect();
        Ok(Self { child, notices })
    }

    /// The number of the process, which is that of its group.
    pub(super) fn pid(&self) -> Pid {
        pid_of(&self.child)
    }

    /// Waits for its end, or kills it after so long: how it ended, and what it last wrote to stderr.
    pub(super) fn end(mut self, limit: Option<Duration>) -> (String, Vec<String>) {
        let in_time = limit.and_then(|limit| poll(limit, || self.child.try_wait().transpose()));
        let ended = in_time.unwrap_or_else(|| {
            if limit.is_some() {
                self.child.kill()?;
            }
            self.child.wait()
        });
        let ended = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
        // Others may hold it open; then its last lines are not worth the wait.
        let is_over = || self.notices.iter().all(JoinHandle::is_finished);
        let last_lines = poll(NOTICES_WAIT, || is_over().then_some(()))
            .and_then(|()| self.notices.pop()?.join().ok());
        (ended, last_lines.unwrap_or_default())
    }
}

fn show_notices(mut from: impl Read + Send + 'static, label: &str) -> JoinHandle<Vec<String>> {
    let mut notices = LabelledOutput::new(label.to_string(), Stream::Err, None);
    thread::start(move || {
        let mut buffer = [0; 4096];
        while let Ok(num_bytes @ 1..) = from.read(&mut buffer) {
            let _ = notices.write(&buffer[..num_bytes]);
        }
        notices.flush();
        notices.last_lines()
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
