//! What a rank finds in its mailbox.

use super::{Departure, Mail};

/// What a rank finds in its [`Mailbox`](super::Mailbox).
#[derive(Clone, Debug)]
pub enum Received {
    /// A message.
    Mail(Mail),
    /// A rank sends nothing any more, and everything that it has sent was received, or is of another tag.
    Left(Departure),
}
