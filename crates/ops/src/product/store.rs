//! Where sums go: into the result, rounded once, or, between passes over `k`, into memory of f32.

use super::kernel::ROW_LINES;
use crate::element::Element;
use crate::lines::{LANES, Line, floats};
use crate::matrix::{Addend, MatrixMut};
use crate::product_lanes::Lanes;
use candle_core::DType;
use std::arch::x86_64::{
    _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_castsi512_ps, _mm512_load_ps,
};
use std::ops::Range;

/// Some columns of a result.
pub(super) struct Target<'a, Out> {
    out: &'a MatrixMut<'a, Out>,
    addend: Addend<'a, Out>,
    cols: Range<usize>,
    /// The sums of the passes so far, row by row, unless the result itself can hold them.
    partial: Option<*mut f32>,
    /// The memory of `partial`.
    _memory: Vec<f32>,
}

// SAFETY: the one part that threads may not simply share is the memory written to, and each writes rows or columns of its own.
unsafe impl<Out> Sync for Target<'_, Out> {}

impl<'a, Out: Element> Target<'a, Out> {
    pub(super) fn new(
        out: &'a MatrixMut<'a, Out>,
        addend: Addend<'a, Out>,
        cols: Range<usize>,
        num_passes: usize,
    ) -> Self {
        let needs_memory = num_passes > 1 && Out::DTYPE != DType::F32;
        let len = if needs_memory {
            out.rows * cols.len()
        } else {
            0
        };
        let mut memory = Vec::with_capacity(len);
        Self {
            out,
            addend,
            cols,
            partial: needs_memory.then_some(memory.as_mut_ptr()),
            _memory: memory,
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.out.rows
    }

    /// Asks for the memory of these rows and columns of the result, which are about to be stored.
    pub(super) fn prefetch(&self, rows: Range<usize>, cols: &Range<usize>) {
        for row in rows {
            let place = row * self.out.row_stride + cols.start;
            let out = self.out.data.wrapping_add(place).cast::<i8>();
            let in_line = out.addr() % size_of::<Line>();
            let bytes = in_line + cols.len() * size_of::<Out>();
            for byte in (0..bytes).step_by(size_of::<Line>()) {
                // SAFETY: nothing is read or written, whatever the address.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(out.wrapping_sub(in_line).wrapping_add(byte))
                };
            }
        }
    }

    /// As [`Self::store`], on any processor.
    ///
    /// # Safety
    /// As there, but for the processor.
    pub(super) unsafe fn store_anywhere(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        sums: &[Line],
        (is_first, is_last): (bool, bool),
    ) {
        for (row, sums) in rows.zip(sums.as_chunks::<ROW_LINES>().0) {
            for (col, sum) in cols.clone().zip(floats(sums)) {
                let out = self.out.data.wrapping_add(row * self.out.row_stride + col);
                let partial = self.partial.map(|partial| {
                    partial.wrapping_add(row * self.cols.len() + col - self.cols.start)
                });
                // SAFETY: the element lies in the result, only ours as promised by the caller; it, or the memory of the sums, holds a value
                // where it is read.
                unsafe {
                    let added = match (partial, self.addend) {
                        (Some(partial), _) if !is_first => partial.read(),
                        (None, _) if !is_first => out.read().widen(),
                        // Added to 0, it leaves the sign.
                        (_, Addend::Nothing) => -0.0,
                        (_, Addend::Result) => out.read().widen(),
                        (_, Addend::Values(values)) => values[row * self.out.cols + col].widen(),
                        (_, Addend::Bias(bias)) => bias[col],
                    };
                    match partial {
                        Some(partial) if !is_last => partial.write(sum + added),
                        _ => out.write(Out::nearest(sum + added)),
                    }
                }
            }
        }
    }

    /// Stores rows of sums, [`ROW_LINES`] lines each, of as many columns or fewer; `is_first` and `is_last` tell about the pass.
    ///
    /// # Safety
    /// The processor has AVX-512. Nobody else uses these rows of these columns meanwhile, and the passes before have stored theirs.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn store(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        sums: &[Line],
        (is_first, is_last): (bool, bool),
    ) {
        for (row, sums) in rows.zip(sums.as_chunks::<ROW_LINES>().0) {
            let place = row * self.out.row_stride + cols.start;
            let out = self.out.data.wrapping_add(place);
            let partial = self.partial.map(|partial| {
                let place = row * self.cols.len() + cols.start - self.cols.start;
                // SAFETY: as for the result, which has as many rows.
                unsafe { partial.add(place) }
            });
            for (i, line) in sums.iter().enumerate().take(cols.len().div_ceil(LANES)) {
                let len = LANES.min(cols.len() - i * LANES);
                let (first, col) = (i * LANES, cols.start + i * LANES);
                // SAFETY: a line is 64 bytes, aligned. The elements lie in the result, only ours as promised by the caller; it, or the memory
                // of the sums, holds values of these places where they are read. Addends are as long as their rows.
                unsafe {
                    let mut sums = _mm512_load_ps(line.0.as_ptr().cast());
                    let mut add = |values| sums = _mm512_add_ps(sums, _mm512_castsi512_ps(values));
                    match partial {
                        Some(partial) if !is_first => add(f32::terms(partial.add(first), len)),
                        None if !is_first => add(Out::terms(out.add(first), len)),
                        _ => match self.addend {
                            Addend::Nothing => {}
                            Addend::Result => add(Out::terms(out.add(first), len)),
                            Addend::Values(values) => {
                                let values = &values[row * self.out.cols + col..][..len];
                                add(Out::terms(values.as_ptr(), len));
                            }
                            Addend::Bias(bias) => {
                                add(f32::terms(bias[col..][..len].as_ptr(), len));
                            }
                        },
                    }
                    match partial {
                        Some(partial) if !is_last => f32::store(partial.add(first), len, sums),
                        _ => Out::store(out.add(first), len, sums),
                    }
                }
            }
        }
    }
}
