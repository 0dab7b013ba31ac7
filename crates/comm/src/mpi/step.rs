//! What a [route](super::route) is made of.

use super::buffer::Buffer;
use super::group::Kind;
use crate::reduction::plan::Piece;

/// What a rank does for a chunk, a piece of the work: it receives messages, combines them with its own input, and sends what that gives.
pub(super) struct Step {
    pub lane: Lane,
    pub piece: Piece,
    /// Without, the only message is what it gives.
    pub reads_input: bool,
    pub sources: Vec<Source>,
    pub source_kind: Kind,
    pub gives: Gives,
    /// Of what it gives.
    pub num_bytes: usize,
    /// For what it gives, if that is a part of a new output.
    pub room: Option<Buffer>,
    pub targets: Vec<usize>,
    pub target_kind: Kind,
}

/// Steps that a rank begins in the order of their chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    /// This rank's input goes to another rank, or stays.
    To(usize),
    /// Contributions are reduced here.
    Gather,
    /// Results come from one rank, in messages of one kind.
    From(usize, Kind),
    /// Results come from other hosts and are sent on to ranks on this one.
    PassOn,
}

/// A message to a rank.
#[derive(Clone, Copy)]
pub(super) struct Source {
    /// From this one.
    pub rank: usize,
    /// It has not the rank's values, but the blocks of this host, whose collector the rank is.
    pub host: Option<usize>,
    pub num_bytes: usize,
}

/// What a step gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gives {
    /// A copy of the input.
    Copy,
    /// The blocks of a host, accumulated.
    Blocks,
    /// A part of this rank's output.
    Result,
}
