//! The agents that MPI starts, one for each rank.

use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Instant;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::Event;
use super::agent_link::{EXIT_WAIT, pid_of, poll, show_notices};
use super::door::Door;
use super::outcome::{Outcome, Remedy};
use super::run::START_DEADLINE;
use super::verdict::describe_signal;
use crate::launcher::layout::Mpi;
use crate::launcher::mpi;
use crate::{Error, Result};

/// MPI's launcher, at work.
pub(super) struct MpiJob {
    pub(super) pid: Pid,
    name: String,
    /// End when it does, and when its outputs do.
    threads: [JoinHandle<()>; 3],
}

impl MpiJob {
    /// Starts it; the agents call at this door.
    pub(super) fn start(mpi: &Mpi, door: &Door, events: &Sender<Event>) -> Result<Self> {
        let name = mpi.words[0].clone();
        let mut command = Command::new(&name);
        command
            .args(&mpi.words[1..])
            .arg(&door.address)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if !door.is_given {
            command.env("CANDLE_TRAIN_RUN_TOKEN", door.secret.as_str());
        }
        mpi::prepare(&mut command, &mpi.via, !door.is_given);
        let cannot = || Error::Launch(format!("cannot run {name:?}"));
        let mut child = command
            .spawn()
            .map_err(|error| Error::Launch(format!("cannot run {name:?}: {error}")))?;
        let stdout = child.stdout.take().ok_or_else(cannot)?;
        let stderr = child.stderr.take().ok_or_else(cannot)?;
        let label = || format!("[{name}] ");
        let outputs = [show_notices(stdout, label()), show_notices(stderr, label())];
        let [out, err] = outputs.map(|output| std::thread::spawn(move || drop(output.join())));
        let pid = pid_of(&child);
        let (called, events) = (name.clone(), events.clone());
        let wait = std::thread::spawn(move || {
            let ended = child
                .wait()
                .map_or_else(|error| error.to_string(), |status| status.to_string());
            let _ = events.send(Event::MpiEnded(
                pid,
                format!("{called} has ended ({ended})"),
            ));
        });
        Ok(Self {
            pid,
            name,
            threads: [wait, out, err],
        })
    }

    /// The calls of all agents, by rank; or why the run ends before.
    pub(super) fn gather(
        &self,
        num_ranks: usize,
        events: &Receiver<Event>,
    ) -> std::result::Result<Vec<TcpStream>, Outcome> {
        let mut calls: Vec<Option<TcpStream>> = (0..num_ranks).map(|_| None).collect();
        let deadline = Instant::now() + START_DEADLINE;
        let why = loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            match events.recv_timeout(rest) {
                Ok(Event::Called { rank, stream }) if rank < num_ranks => {
                    calls[rank] = Some(stream);
                }
                Ok(Event::Signal(signal)) => {
                    let sentence = describe_signal(signal as i32, &[]);
                    return Err(Outcome::last(128 + signal as u8, Some(sentence)));
                }
                Ok(Event::MpiEnded(pid, how)) if pid == self.pid => break how,
                Ok(_) => {}
                Err(_) => break format!("no answer within {} s", START_DEADLINE.as_secs()),
            }
            if calls.iter().all(Option::is_some) {
                return Ok(calls.into_iter().flatten().collect());
            }
        };
        let missing = calls.iter().filter(|call| call.is_none()).count();
        let name = &self.name;
        Err(Outcome {
            exit_code: super::NOT_STARTED_EXIT_CODE,
            sentence: Some(format!(
                "{name} did not start the ranks: {missing} of {num_ranks} are missing, {why}"
            )),
            remedy: Remedy::Without(Vec::new()),
        })
    }

    /// Waits until it has ended, as it does soon after its agents, or ends it.
    pub(super) fn end(self) {
        let is_over = || {
            self.threads
                .iter()
                .all(JoinHandle::is_finished)
                .then_some(())
        };
        if poll(EXIT_WAIT, is_over).is_none() {
            let _ = killpg(self.pid, Signal::SIGKILL);
        }
    }
}
