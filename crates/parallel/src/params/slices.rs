//! Flat values of which each data-parallel rank holds a slice.

use std::ops::Range;

use candle_comm::{Pending, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{QuantizedType, dequantize_rows_into, quantize_rows};

use crate::memory::num_bytes;
use crate::placement::{intersect, offset_by};

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
    let start = slices.get(dp.rank()).map_or(0, |slice| slice.start);
    start_gather_range(range, slices, (own, start), dp, false)?.wait()
}

/// Pieces of a range on their way.
pub(crate) struct GatheredRange {
    pieces: Vec<(usize, Pending<Tensor>)>,
    /// What they are received with: a rank gives a tensor of what it receives.
    received_with: usize,
    /// An empty tensor of the type of the values, and where they are.
    like: Tensor,
}

/// [`gather_range`] where `own` is what this rank has from `start` on, of which only what is in the range is needed, started; if `is_quantized` pieces are sent in 8 bits, and what they hold then is what every rank gets.
pub(crate) fn start_gather_range(
    range: &Range<usize>,
    slices: &[Range<usize>],
    (own, start): (&Tensor, usize),
    dp: &ProcessGroup,
    is_quantized: bool,
) -> Result<GatheredRange> {
    let (mut pieces, mut received_with) = (Vec::new(), 0);
    for (root, slice) in slices.iter().enumerate() {
        let piece = intersect(range, slice);
        if piece.is_empty() {
            continue;
        }
        let len = piece.len();
        let sent = if root == dp.rank() {
            let piece = offset_by(&piece, start);
            let values = own.narrow(0, piece.start, len)?;
            match is_quantized {
                true => quantize_rows(&values, QuantizedType::Int8)?,
                false => values,
            }
        } else {
            let sent = match is_quantized {
                true => Tensor::zeros(QuantizedType::Int8.row_bytes(len), DType::U8, own.device())?,
                false => Tensor::zeros(len, own.dtype(), own.device())?,
            };
            received_with += num_bytes(&sent);
            sent
        };
        pieces.push((len, dp.start_broadcast(&sent, root)?));
    }
    // An allocation of nothing is an error to CUDA.
    let like = own.narrow(0, 0, 0)?;
    Ok(GatheredRange {
        pieces,
        received_with,
        like,
    })
}

impl GatheredRange {
    /// Number of ranks that hold a piece.
    pub fn num_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes of the values.
    pub fn num_value_bytes(&self) -> usize {
        let lens = self.pieces.iter().map(|(len, _)| len);
        lens.sum::<usize>() * self.like.dtype().size_in_bytes()
    }

    /// Bytes that exist until [`Self::wait`] has returned.
    pub fn num_bytes(&self) -> usize {
        self.num_value_bytes() + self.received_with
    }

    /// All values of the range, flat.
    pub fn wait(self) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(self.pieces.len());
        for (len, piece) in self.pieces {
            parts.push(unpacked(piece.wait()?, len, self.like.dtype())?);
        }
        match parts.as_slice() {
            [] => Ok(self.like),
            [part] => Ok(part.clone()),
            parts => Tensor::cat(parts, 0),
        }
    }
}

/// No values, flat.
pub(crate) fn no_values(dtype: DType, device: &Device) -> Result<Tensor> {
    // An allocation of nothing is an error to CUDA.
    Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)
}

/// Rows of `len` values of type `dtype`, flat, of what may have been sent in 8 bits.
pub(super) fn unpacked(sent: Tensor, len: usize, dtype: DType) -> Result<Tensor> {
    if sent.dtype() == dtype {
        return Ok(sent);
    }
    if len == 0 {
        return no_values(dtype, sent.device());
    }
    let rows = sent.reshape(((), QuantizedType::Int8.row_bytes(len)))?;
    let whole = Tensor::zeros((rows.dim(0)?, len), dtype, sent.device())?;
    dequantize_rows_into(&whole, false, &rows, QuantizedType::Int8)?;
    whole.flatten_all()
}
