//! How a rank ended.

use std::fmt;

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use serde::{Deserialize, Serialize};

/// The exit code of a rank that ends because another rank of its run failed.
///
/// The launcher never names such a rank as the cause where a rank failed by itself.
pub const PEER_FAILED_EXIT_CODE: u8 = 85;

/// The exit code of a rank that would end in the same way if it was started again: its command line is wrong, say. Parsers of command
/// lines have it so.
pub const WOULD_FAIL_AGAIN_EXIT_CODE: u8 = 2;
/// The exit code of a rank that has to be started by an MPI library's launcher, and so has done nothing yet.
pub const NEEDS_MPI_EXIT_CODE: u8 = 86;

/// The exit code of a launcher that lost a host.
pub(super) const LOST_HOST_EXIT_CODE: u8 = 1;

/// Those of shells, and of ours, where a program cannot be run.
const CANNOT_RUN_EXIT_CODES: [i32; 2] = [126, 127];
/// What asks a training run to stop; it then exits with 128 and the number.
const STOPPING: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1];

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

impl End {
    /// Of a process that was waited for; `None` if it was only stopped or continued.
    pub(super) fn of(status: WaitStatus) -> Option<Self> {
        match status {
            WaitStatus::Exited(_, code) => Some(Self::Exited(code)),
            WaitStatus::Signaled(_, signal, _) => Some(Self::Killed(signal as i32)),
            _ => None,
        }
    }

    pub(super) fn is_success(self) -> bool {
        self == Self::Exited(0)
    }

    /// Whether the rank says that it ended because of another one.
    pub(super) fn is_due_to_peer(self) -> bool {
        self == Self::Exited(i32::from(PEER_FAILED_EXIT_CODE))
    }

    /// The signal that asked the rank to stop, if one has.
    fn stopped_by(self) -> Option<Signal> {
        STOPPING.into_iter().find(|signal| {
            let number = *signal as i32;
            [Self::Killed(number), Self::Exited(128 + number)].contains(&self)
        })
    }

    /// Whether the rank was asked to stop, and did.
    pub(super) fn is_asked_for(self) -> bool {
        self.stopped_by().is_some()
    }

    /// Whether the rank has to be started through MPI.
    pub(super) fn needs_mpi(self) -> bool {
        self == Self::Exited(i32::from(NEEDS_MPI_EXIT_CODE))
    }

    /// Whether the rank says that it would end so again.
    pub(super) fn would_fail_again(self) -> bool {
        self == Self::Exited(i32::from(WOULD_FAIL_AGAIN_EXIT_CODE))
    }

    /// Why a rank that ended so is not started again, if that is so.
    pub(super) fn is_for_good(self) -> Option<String> {
        match (self.stopped_by(), self) {
            (Some(signal), _) => Some(format!("it was asked to stop, by {}", signal.as_str())),
            (None, Self::Exited(code))
                if self.would_fail_again() || CANNOT_RUN_EXIT_CODES.contains(&code) =>
            {
                Some(format!("exit code {code} means that it would fail again"))
            }
            _ => None,
        }
    }

    /// The code with which the launcher itself should exit.
    pub(super) fn exit_code(self) -> u8 {
        let code = match self {
            Self::Exited(code) => code,
            Self::Killed(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(1)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Killed(signal) => write!(f, "killed by {}", signal_name(signal)),
        }
    }
}

/// `SIGKILL` for 9; the number where a signal has no name.
pub(super) fn signal_name(signal: i32) -> String {
    match Signal::try_from(signal) {
        Ok(named) => named.as_str().to_string(),
        Err(_) => format!("signal {signal}"),
    }
}
