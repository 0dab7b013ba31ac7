//! A message of one rank to another.

use candle_core::Tensor;

/// A message of one rank to another.
#[derive(Clone, Debug)]
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
