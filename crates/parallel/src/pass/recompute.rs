//! What the tape keeps of a block's forward pass, and what the backward pass computes again.

use candle_core::{Result, Tensor, bail};

use crate::checksums::checksum;

/// What the tape keeps of a block between its forward and its backward pass. Losses and gradients are the same, bit for bit.
///
/// The model's first block, which keeps tokens, and its last one, which computes its loss with its gradients, are run once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Recompute {
    /// All that the backward pass reads, but for what takes next to no time to compute again.
    #[default]
    None,
    /// The block's input; the forward pass, collectives included, runs again before the backward pass (arXiv:1604.06174). A block that
    /// draws random numbers must draw the same ones again. That its last row is the same is checked: each time on a CPU, the first
    /// time on a GPU.
    Full,
}

/// The bits of what a block gives: of (b, t, hidden) those at the last position of each sequence, which depends on all others if it
/// depends on any.
pub(crate) fn fingerprint(output: &Tensor) -> Result<u64> {
    let Ok((_b, t, _hidden)) = output.dims3() else {
        return checksum(output);
    };
    checksum(&output.narrow(1, t.saturating_sub(1), t.min(1))?)
}

/// An error if a block gave other values when its forward pass ran again.
pub(crate) fn check_repeats(first: u64, again: &Tensor) -> Result<()> {
    if first != fingerprint(again)? {
        bail!(
            "the block's forward pass gave other values when it was run again to recompute activations, so its gradients would \
             be wrong\nhint: a block that draws random numbers, as for dropout, must draw the same ones again; or keep its \
             activations: ModelPart::with_recompute asks for each block"
        )
    }
    Ok(())
}
