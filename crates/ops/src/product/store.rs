//! Where sums go: into the result, rounded once, or, between passes over `k`, into memory of f32.

use super::kernel::ROW_LINES;
use crate::element::Element;
use crate::lines::{LANES, Line};
use crate::matrix::{Addend, MatrixMut};
use crate::vectorised::vectorised;
use candle_core::DType;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice::from_raw_parts_mut;

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

// SAFETY: the one part that threads may not simply share is the memory written to, and each writes rows of its own.
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

    /// Stores rows of sums, [`ROW_LINES`] lines each, of as many columns or fewer; `is_first` and `is_last` tell about the pass. The lines
    /// are left in any state.
    ///
    /// # Safety
    /// Nobody else uses these rows of these columns meanwhile, and the passes before have stored theirs.
    pub(super) unsafe fn store(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        sums: &mut [Line],
        (is_first, is_last): (bool, bool),
    ) {
        let adds_result = is_first && matches!(self.addend, Addend::Result);
        vectorised(
            #[inline(always)]
            || {
                for (row, sums) in rows.zip(sums.as_chunks_mut::<ROW_LINES>().0) {
                    let place = row * self.out.row_stride + cols.start;
                    let out = self.out.data.wrapping_add(place);
                    let partial = self.partial.map(|partial| {
                        let place = row * self.cols.len() + cols.start - self.cols.start;
                        // SAFETY: as for the result, which has as many rows.
                        unsafe { partial.add(place) }
                    });
                    match partial {
                        // SAFETY: the pass before has written these.
                        Some(partial) if !is_first => unsafe {
                            add(sums, from_raw_parts_mut(partial, cols.len()));
                        },
                        // SAFETY: the elements lie in the result, which holds values then, and are only ours as promised by the caller.
                        _ if adds_result || !is_first => unsafe {
                            add(sums, from_raw_parts_mut(out, cols.len()));
                        },
                        _ => {}
                    }
                    match self.addend {
                        Addend::Values(values) if is_first => {
                            let start = row * self.out.cols + cols.start;
                            add(sums, &values[start..][..cols.len()]);
                        }
                        Addend::Bias(bias) if is_first => add(sums, &bias[cols.clone()]),
                        _ => {}
                    }
                    match partial {
                        // SAFETY: there is room for the sums.
                        Some(partial) if !is_last => unsafe {
                            partial.copy_from_nonoverlapping(sums.as_ptr().cast(), cols.len());
                        },
                        // SAFETY: as above; they need not hold values yet.
                        _ => unsafe {
                            write::<Out>(from_raw_parts_mut(out.cast(), cols.len()), sums);
                        },
                    }
                }
            },
        );
    }
}

#[inline(always)]
fn add<T: Element>(sums: &mut [Line; ROW_LINES], values: &[T]) {
    let add = |line: &mut Line, values: &[T]| {
        for (sum, value) in line.0.iter_mut().zip(values) {
            *sum = (f32::from_bits(*sum) + value.widen()).to_bits();
        }
    };
    // Whole lines, whose length is known, are vectors.
    let (whole, rest) = values.as_chunks::<LANES>();
    for (line, values) in sums.iter_mut().zip(whole) {
        add(line, values);
    }
    if let Some(line) = sums.get_mut(whole.len()) {
        add(line, rest);
    }
}

#[inline(always)]
fn write<T: Element>(out: &mut [MaybeUninit<T>], sums: &[Line; ROW_LINES]) {
    let nearest = |line: &Line| {
        let nearest = |sum| MaybeUninit::new(T::nearest(f32::from_bits(sum)));
        line.0.map(nearest)
    };
    let (whole, rest) = out.as_chunks_mut::<LANES>();
    if let Some(line) = sums.get(whole.len()) {
        rest.copy_from_slice(&nearest(line)[..rest.len()]);
    }
    for (out, line) in whole.iter_mut().zip(sums) {
        *out = nearest(line);
    }
}
