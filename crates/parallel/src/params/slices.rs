//! Flat values of which each data-parallel rank holds a slice.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor};

use super::placement::{intersect, offset_by};

/// The values `range` of a flat buffer, on every rank of `dp`. `slices` are the parts of the buffer that the ranks hold, in rank
/// order, and `own` are the values of this rank's.
///
/// Whoever holds a piece sends it to all, so no rank has more than these values beside its own. Every rank of `dp` must call it.
pub(crate) fn gather_range(
    range: &Range<usize>,
    slices: &[Range<usize>],
    own: &Tensor,
    dp: &ProcessGroup,
) -> Result<Tensor> {
    let own_start = slices.get(dp.rank()).map_or(0, |slice| slice.start);
    let here = |piece: &Range<usize>| {
        let piece = offset_by(piece, own_start);
        own.narrow(0, piece.start, piece.len())
    };
    let pieces = slices.iter().map(|slice| intersect(range, slice));
    let pieces: Vec<Range<usize>> = pieces.collect();
    if range.is_empty() {
        return Tensor::zeros(0, own.dtype(), own.device());
    }
    if pieces.iter().all(|piece| piece == range) {
        return here(range);
    }
    let mut parts = Vec::new();
    for (root, piece) in pieces.iter().enumerate() {
        if piece.is_empty() {
            continue;
        }
        let part = match root == dp.rank() {
            true => here(piece)?,
            false => Tensor::zeros(piece.len(), own.dtype(), own.device())?,
        };
        parts.push(dp.broadcast(&part, root)?);
    }
    Tensor::cat(&parts, 0)
}
