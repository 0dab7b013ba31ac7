//! How a rank ended.

use std::fmt;

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use serde::{Deserialize, Serialize};

/// The exit code of a rank that ends because another rank of its run failed.
///
/// The launcher never names such a rank as the cause where a rank failed by itself.
pub const PEER_FAILED_EXIT_CODE: u8 = 85;

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
