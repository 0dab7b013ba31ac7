//! What a rank finds in its mailbox.

use candle_core::Tensor;

/// What a rank finds in its [`Mailbox`](super::Mailbox).
#[derive(Clone, Debug)]
pub enum Received {
    /// A message.
    Mail(Mail),
    /// A rank sends nothing any more, and everything that it has sent was received, or is of another tag.
    Left(Departure),
}

/// A message of one rank to another.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Mail {
    /// The rank that sent it.
    pub from: usize,
    /// What it is about, as its sender says.
    pub tag: u64,
    /// What it holds, on the CPU.
    pub tensors: Vec<Tensor>,
}

impl Mail {
    /// What it takes in an inbox. One without tensors takes something, too, so that not even of these there is an unbounded number.
    pub(super) fn num_bytes(&self) -> usize {
        let of_tensor = |xs: &Tensor| xs.elem_count() * xs.dtype().size_in_bytes();
        64 + self.tensors.iter().map(of_tensor).sum::<usize>()
    }
}

/// The end of a rank, as the others hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The rank.
    pub rank: usize,
    /// Why it is gone; `None` if it has left because it was done.
    pub why: Option<String>,
    /// The rank because of which it failed, and which failed by itself; `None` if that is this one.
    pub because_of: Option<Box<Departure>>,
}

impl Departure {
    /// The end of the rank that failed first, as far as this one knew.
    pub fn culprit(&self) -> &Self {
        self.because_of.as_deref().unwrap_or(self)
    }
}

impl std::fmt::Display for Departure {
    /// `rank 3 has left`, or `rank 3 is gone: ` and why.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.why {
            None => write!(f, "rank {} has left", self.rank),
            Some(why) => write!(f, "rank {} is gone: {why}", self.rank),
        }
    }
}
