//! A process on its way to become a rank.
//!
//! `candle-train rank AGENT PROGRAM ARGS` asks the kernel for SIGKILL at the end of its agent and then becomes the program.
//! The request outlives `exec`, not `fork`, so it has to be made in between.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getppid};

/// Becomes `program`; returns only if that is impossible, with the reason.
pub fn become_rank(agent_pid: i32, program: &OsString, args: &[OsString]) -> String {
    if let Err(errno) = set_pdeathsig(Signal::SIGKILL) {
        return format!("cannot tie the rank to its agent: {errno}");
    }
    // The agent may have ended before the request.
    if getppid() != Pid::from_raw(agent_pid) {
        return "the agent that started this rank is gone".to_string();
    }
    // The agent blocks the signals that end a run, and the program would inherit that.
    if let Err(errno) = SigSet::all().thread_unblock() {
        return format!("cannot unblock signals: {errno}");
    }
    let error = Command::new(program).args(args).exec();
    format!("cannot run {}: {error}", program.display())
}
