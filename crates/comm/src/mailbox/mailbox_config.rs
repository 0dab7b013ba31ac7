//! How a rank sends and receives messages.

use std::time::Duration;

/// How a rank sends and receives messages: see [`Mailbox`](super::Mailbox).
#[derive(Debug, Clone)]
pub struct MailboxConfig {
    /// Messages of one sender that have come and were not received may have so many bytes before it waits; one more may then be on its
    /// way. Default: 256 MiB.
    pub inbox_bytes: usize,
    /// How long a rank waits for a message, or for another rank to take one. Default: 10 minutes.
    pub deadline: Duration,
    /// A rank that is a process and says nothing for so long is gone. Default: 6 seconds.
    pub silence: Duration,
}

impl Default for MailboxConfig {
    fn default() -> Self {
        Self {
            inbox_bytes: 256 << 20,
            deadline: Duration::from_secs(600),
            silence: Duration::from_secs(6),
        }
    }
}
