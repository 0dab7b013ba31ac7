//! The agents that MPI starts, one for each rank.

use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};

use super::Event;
use super::agent_link::{EXIT_WAIT, pid_of, poll, show_notices};
use super::door::Door;
use super::outcome::{Outcome, Remedy};
use super::run::START_DEADLINE;
use super::verdict::describe_signal;
use crate::launcher::layout::Mpi;
use crate::launcher::mpi;
use crate::{Error, Result};

/// How often it is asked whether MPI's launcher still runs.
const LOOK: Duration = Duration::from_millis(100);

/// MPI's launcher, at work.
pub(super) struct MpiJob {
    child: Child,
    name: String,
    notices: [JoinHandle<Vec<String>>; 2],
}

impl MpiJob {
    /// Starts it; the agents call at this door.
    pub(super) fn start(mpi: &Mpi, door: &Door) -> Result<Self> {
        let name = mpi.words[0].clone();
        let mut command = Command::new(&name);
        command
            .args(&mpi.words[1..])
            .arg(&door.address)
            .env("CANDLE_TRAIN_RUN_TOKEN", door.secret.as_str())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        mpi::prepare(&mut command, &mpi.via);
        let cannot = || Error::Launch(format!("cannot run {name:?}"));
        let mut child = command
            .spawn()
            .map_err(|error| Error::Launch(format!("cannot run {name:?}: {error}")))?;
        let stdout = child.stdout.take().ok_or_else(cannot)?;
        let stderr = child.stderr.take().ok_or_else(cannot)?;
        let label = || format!("[{name}] ");
        let notices = [show_notices(stdout, label()), show_notices(stderr, label())];
        Ok(Self {
            child,
            name,
            notices,
        })
    }

    /// The calls of all agents, by rank; or why the run ends before.
    pub(super) fn gather(
        &mut self,
        num_ranks: usize,
        events: &Receiver<Event>,
    ) -> std::result::Result<Vec<TcpStream>, Outcome> {
        let mut calls: Vec<Option<TcpStream>> = (0..num_ranks).map(|_| None).collect();
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            match events.recv_timeout(LOOK) {
                Ok(Event::Called { rank, stream }) if rank < num_ranks => {
                    calls[rank] = Some(stream);
                }
                Ok(Event::Signal(signal)) => {
                    let sentence = describe_signal(signal as i32, &[]);
                    return Err(Outcome::last(128 + signal as u8, Some(sentence)));
                }
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if calls.iter().all(Option::is_some) {
                return Ok(calls.into_iter().flatten().collect());
            }
            let ended = self.child.try_wait().ok().flatten();
            let why = match ended {
                Some(status) => format!("it ended ({status})"),
                None if Instant::now() > deadline => {
                    format!("no answer within {} s", START_DEADLINE.as_secs())
                }
                None => continue,
            };
            let missing = calls.iter().filter(|call| call.is_none()).count();
            return Err(self.failed(&format!(
                "{missing} of {num_ranks} ranks are missing, {why}"
            )));
        }
        Err(self.failed("nobody listens"))
    }

    fn failed(&self, why: &str) -> Outcome {
        Outcome {
            exit_code: super::NOT_STARTED_EXIT_CODE,
            sentence: Some(format!("{} did not start the ranks: {why}", self.name)),
            remedy: Remedy::Without(Vec::new()),
        }
    }

    /// Waits until it has ended, as it does soon after its agents, or ends it.
    pub(super) fn end(mut self) {
        let ended = poll(EXIT_WAIT, || self.child.try_wait().transpose());
        if ended.is_none() {
            let _ = killpg(pid_of(&self.child), Signal::SIGKILL);
            let _ = self.child.wait();
        }
        let is_all_said = || {
            self.notices
                .iter()
                .all(JoinHandle::is_finished)
                .then_some(())
        };
        poll(LOOK, is_all_said);
    }
}
