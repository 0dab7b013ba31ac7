//! Where sums go: into the result, rounded once, or, between passes over `k`, into memory of f32.

use super::kernel::ROW_LINES;
use super::matrix::{Addend, MatrixMut};
use crate::cpu::avx512::Lanes;
use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line};
use candle_core::DType;
use std::arch::x86_64::{_mm512_add_ps, _mm512_castsi512_ps, _mm512_load_ps};
use std::ops::Range;

/// Stores rows of sums, [`ROW_LINES`] lines each, of as many columns or fewer, into a [`Target`] that [`Target::storing`] gave this for.
///
/// # Safety
/// Nobody else uses these rows of these columns meanwhile, and the passes before have stored theirs.
pub(super) type Store<T> = unsafe fn(&T, Range<usize>, &Range<usize>, &[Line]);

/// What [`Target::store`] adds.
const NOTHING: u8 = 0;
const PARTIAL: u8 = 1;
const RESULT: u8 = 2;
const VALUES: u8 = 3;
const BIAS: u8 = 4;

/// Some columns of a result.
pub(super) struct Target<'a, Out> {
    pub(super) out: &'a MatrixMut<'a, Out>,
    pub(super) addend: Addend<'a, Out>,
    pub(super) cols: Range<usize>,
    /// The sums of the passes so far, row by row, unless the result itself can hold them.
    pub(super) partial: Option<*mut f32>,
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

    /// How rows of sums are stored.
    pub(super) fn storing(&self, (is_first, is_last): (bool, bool)) -> Store<Self> {
        // All kernels are of AVX-512, but for those that tests emulate.
        #[cfg(test)]
        if !crate::cpu::processor::has_avx512() {
            return self.storing_anywhere(is_first, is_last);
        }
        match (self.partial, is_last) {
            (Some(_), false) => self.storing_added::<true>(is_first),
            _ => self.storing_added::<false>(is_first),
        }
    }

    /// The same, to the memory of sums or to the result.
    fn storing_added<const TO_PARTIAL: bool>(&self, is_first: bool) -> Store<Self> {
        match (self.partial, self.addend) {
            (Some(_), _) if !is_first => Self::store::<PARTIAL, TO_PARTIAL>,
            (None, _) if !is_first => Self::store::<RESULT, TO_PARTIAL>,
            (_, Addend::Nothing) => Self::store::<NOTHING, TO_PARTIAL>,
            (_, Addend::Result) => Self::store::<RESULT, TO_PARTIAL>,
            (_, Addend::Values(_)) => Self::store::<VALUES, TO_PARTIAL>,
            (_, Addend::Bias(_)) => Self::store::<BIAS, TO_PARTIAL>,
        }
    }

    /// Stores rows of sums with AVX-512, with something `ADDED`.
    ///
    /// # Safety
    /// That of [`Store`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn store<const ADDED: u8, const TO_PARTIAL: bool>(
        &self,
        rows: Range<usize>,
        cols: &Range<usize>,
        sums: &[Line],
    ) {
        for (row, sums) in rows.zip(sums.as_chunks::<ROW_LINES>().0) {
            let place = row * self.out.row_stride + cols.start;
            let out = self.out.data.wrapping_add(place);
            let place = row * self.cols.len() + cols.start - self.cols.start;
            let partial = (self.partial).map(|partial| partial.wrapping_add(place));
            for (i, line) in sums.iter().enumerate().take(cols.len().div_ceil(LANES)) {
                let len = LANES.min(cols.len() - i * LANES);
                let (first, col) = (i * LANES, cols.start + i * LANES);
                // SAFETY: a line is 64 bytes, aligned. The elements lie in the result, only ours as promised by the caller; it, or the memory
                // of the sums, holds values of these places where they are read. Addends are as long as their rows.
                unsafe {
                    let sums = _mm512_load_ps(line.0.as_ptr().cast());
                    let added = match (ADDED, self.addend, partial) {
                        (PARTIAL, _, Some(partial)) => Some(f32::terms(partial.add(first), len)),
                        (RESULT, ..) => Some(Out::terms(out.add(first), len)),
                        (VALUES, Addend::Values(values), _) => {
                            let values = &values[row * self.out.cols + col..][..len];
                            Some(Out::terms(values.as_ptr(), len))
                        }
                        (BIAS, Addend::Bias(bias), _) => {
                            Some(f32::terms(bias[col..][..len].as_ptr(), len))
                        }
                        (NOTHING, ..) => None,
                        _ => unreachable!("there is what `storing` chose this for"),
                    };
                    let sums = match added {
                        Some(added) => _mm512_add_ps(sums, _mm512_castsi512_ps(added)),
                        None => sums,
                    };
                    match partial {
                        Some(partial) if TO_PARTIAL => f32::store(partial.add(first), len, sums),
                        _ => Out::store(out.add(first), len, sums),
                    }
                }
            }
        }
    }
}

/// Sums of a tile that are still to be stored, some rows after the others.
pub(super) struct Pending<'a, Out> {
    target: &'a Target<'a, Out>,
    store: Store<Target<'a, Out>>,
    rows: Range<usize>,
    cols: Range<usize>,
    num_stored: usize,
}

impl<'a, Out: Element> Pending<'a, Out> {
    /// Sums of these rows and columns, to be stored as [`Target::storing`] says.
    pub(super) fn new(
        target: &'a Target<'a, Out>,
        store: Store<Target<'a, Out>>,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Self {
        Self {
            target,
            store,
            rows,
            cols,
            num_stored: 0,
        }
    }

    /// Stores the next rows of these sums, until so many of so many parts of them are stored.
    ///
    /// # Safety
    /// That of [`Store`].
    #[inline]
    pub(super) unsafe fn store(&mut self, sums: &[Line], done: usize, of: usize) {
        let until = self.rows.len() * done / of;
        if until > self.num_stored {
            let rows = self.rows.start + self.num_stored..self.rows.start + until;
            let sums = &sums[self.num_stored * ROW_LINES..];
            self.num_stored = until;
            // SAFETY: as promised by the caller.
            unsafe { (self.store)(self.target, rows, &self.cols, sums) };
        }
    }
}
