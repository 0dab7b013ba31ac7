//! How a rank ended.

use std::fmt;

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use serde::{Deserialize, Serialize};

use crate::stop_signals::STOPPING;

/// The exit code of a rank that ends because another rank of its run failed.
///
/// The launcher never names such a rank as the cause where a rank failed by itself.
pub const PEER_FAILED_EXIT_CODE: u8 = 85;

/// The exit code of a rank that would end in the same way if it was started again: its command line is wrong, say. Parsers of command
/// lines have it so.
pub const WOULD_FAIL_AGAIN_EXIT_CODE: u8 = 2;
/// The exit code of a rank that has to be started by an MPI library's launcher, and so has done nothing yet.
pub const NEEDS_MPI_EXIT_CODE: u8 = 86;

/// The exit code of a rank that was started again and cannot go on, found before its first step: on other hosts it may.
pub const CANNOT_GO_ON_EXIT_CODE: u8 = 87;

/// The exit code of a training run that is over, at its end or because it was asked to stop, and whose checkpoints could not be saved: all of
/// them, or the one that it was to leave.
pub const NOT_SAVED_EXIT_CODE: u8 = 88;

/// The exit code of a launcher that lost a host.
pub(super) const LOST_HOST_EXIT_CODE: u8 = 1;

/// Codes of ranks that would end so again: the last two are those of shells, and ours, where a program cannot be run.
const FOR_GOOD: [u8; 3] = [WOULD_FAIL_AGAIN_EXIT_CODE, 126, 127];

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

    /// Whether it ended by itself, with this code.
    pub(super) fn has_code(self, code: u8) -> bool {
        self == Self::Exited(code.into())
    }

    /// The signal that asked the rank to stop, if one has; a training run then exits with 128 and its number.
    pub(super) fn stopped_by(self) -> Option<Signal> {
        STOPPING.into_iter().find(|signal| {
            let number = *signal as i32;
            [Self::Killed(number), Self::Exited(128 + number)].contains(&self)
        })
    }

    /// Why a rank that ended so is not started again, if that is so.
    pub(super) fn is_for_good(self) -> Option<String> {
        if let Some(signal) = self.stopped_by() {
            return Some(format!("it was asked to stop, by {}", signal.as_str()));
        }
        if self.has_code(NOT_SAVED_EXIT_CODE) {
            return Some(format!(
                "exit code {NOT_SAVED_EXIT_CODE} means that the run is over, and that checkpoints could not be saved"
            ));
        }
        let code = FOR_GOOD.into_iter().find(|code| self.has_code(*code))?;
        Some(format!("exit code {code} means that it would fail again"))
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
            Self::Killed(signal) => match Signal::try_from(signal) {
                Ok(named) => write!(f, "killed by {}", named.as_str()),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
        }
    }
}
