//! A rank of this host: started, signalled, reported.

use std::ffi::OsString;
use std::io::{Read, stdout};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getppid};

use crate::launcher::end::End;
use crate::launcher::host_plan::HostPlan;
use crate::launcher::program::{own_program, pid_of};
use crate::launcher::rank_variables::FOREIGN;
use crate::launcher::thread;
use crate::launcher::wire::{self, Report, Stream};
use crate::limits::at_limit;
use crate::{Error, Result};

/// A rank that ended is reported when its output is through, or after this long: a process it left behind may hold it open.
const DRAIN: Duration = Duration::from_secs(1);
/// What is read of a rank's output at once.
const MAX_OUTPUT: usize = 1 << 16;

/// A rank of this host.
pub(super) struct Rank {
    number: usize,
    pub(super) pid: Pid,
    /// They pass on what it writes.
    outputs: Vec<JoinHandle<()>>,
    pub(super) ended: Option<(End, Instant)>,
    pub(super) is_reported: bool,
}

impl Rank {
    /// Starts it; the kernel kills it when the calling thread ends.
    pub(super) fn start(plan: &HostPlan, local_rank: usize) -> Result<Self> {
        let number = plan.first_rank + local_rank;
        let mut command = Command::new(own_program());
        if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            // A pipeline's channels are streams of a GPU. With CUDA's 8 queues some would share one, and wait for each other.
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        }
        command
            .arg("rank")
            .arg(std::process::id().to_string())
            .arg(&plan.program)
            .args(&plan.args)
            .envs(plan.env.iter().map(|(name, value)| (name, value)))
            .envs(plan.rank_env(local_rank))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: a signal to it reaches what it starts, and a terminal's Ctrl-C only the front.
            .process_group(0);
        for name in FOREIGN.iter().filter(|_| !plan.through_mpi) {
            command.env_remove(name);
        }
        let mut child = command.spawn().map_err(|error| {
            let error = at_limit(&error);
            Error::Launch(format!("cannot start rank {number}: {error}"))
        })?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let out = out.map(|pipe| pass_on(pipe, number, Stream::Out));
        let err = err.map(|pipe| pass_on(pipe, number, Stream::Err));
        Ok(Self {
            number,
            pid: pid_of(&child),
            outputs: out.into_iter().chain(err).collect(),
            ended: None,
            is_reported: false,
        })
    }

    /// Sends a signal to its group, if it runs.
    pub(super) fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            let _ = killpg(self.pid, signal);
        }
    }

    /// Reports its end, if it has ended and its output is through.
    pub(super) fn report_end(&mut self, reports: &Sender<Report>) {
        let Some((end, at)) = self.ended.filter(|_| !self.is_reported) else {
            return;
        };
        if self.outputs.iter().all(JoinHandle::is_finished) || at.elapsed() >= DRAIN {
            self.is_reported = true;
            let _ = reports.send(Report::Ended {
                rank: self.number,
                pid: self.pid.as_raw(),
                end,
                ms_ago: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
            });
        }
    }
}

/// Sends what a rank writes to the front.
fn pass_on(mut pipe: impl Read + Send + 'static, rank: usize, stream: Stream) -> JoinHandle<()> {
    thread::start(move || {
        let mut buffer = vec![0; MAX_OUTPUT];
        while let Ok(num_bytes @ 1..) = pipe.read(&mut buffer) {
            let report = Report::Output { rank, stream };
            let _ = wire::send(&mut stdout(), &report, &buffer[..num_bytes]);
        }
    })
}

/// Becomes `program`, as `candle-train rank AGENT PROGRAM ARGS`, after it has asked the kernel for SIGKILL at the end of its agent; returns
/// only if that is impossible, with the reason.
///
/// The request outlives `exec`, not `fork`, so it has to be made in between.
pub fn become_rank(agent_pid: i32, program: &OsString, args: &[OsString]) -> String {
    if let Err(errno) = set_pdeathsig(Signal::SIGKILL) {
        return format!("cannot tie the rank to its agent: {errno}");
    }
    // The agent may have ended before the request.
    if getppid() != Pid::from_raw(agent_pid) {
        return "the agent that started this rank is gone".to_string();
    }
    let error = Command::new(program).args(args).exec();
    format!("cannot run {}: {}", program.display(), at_limit(&error))
}
