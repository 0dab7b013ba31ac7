//! Cutting a pass over memory into chunks for the cores, the same way whatever the number of threads.

#![allow(unsafe_code)]

use super::shared_buffer::SharedBuffer;
use super::vectorised::vectorised;
use rayon::prelude::*;

/// Below this many elements of work, waking other threads costs more than it saves.
const INLINE_ELEMENTS: usize = 1 << 14;
/// Elements of work in a chunk: 32 KiB of f32, so that a chunk stays in the first-level cache.
const CHUNK_ELEMENTS: usize = 1 << 13;
/// Rows that are summed one by one, before their sum is added to others: the rounding errors of a long sum grow with
/// its number of terms.
pub(crate) const SUMMED_ROWS: usize = 16;
/// Most partial sums kept for one reduction over rows.
const MAX_PARTIALS: usize = 64;
/// Columns of partial sums summed at a time: their sums stay in registers.
const SUMMED_COLUMNS: usize = 32;

/// Rows of `row_len` elements in a chunk.
pub(crate) fn rows_per_chunk(row_len: usize) -> usize {
    (CHUNK_ELEMENTS / row_len.max(1)).max(1)
}

/// Rows in a chunk that leaves one partial sum behind: bounds the number of partial sums too.
pub(crate) fn rows_per_partial(num_rows: usize, row_len: usize) -> usize {
    rows_per_chunk(row_len).max(num_rows.div_ceil(MAX_PARTIALS))
}

/// Not generic: what divides work among threads is long, and would be compiled once more for each pass.
fn on_all_threads(count: usize, f: &(dyn Fn(usize) + Sync)) {
    (0..count).into_par_iter().for_each(f);
}

/// Calls `f(i, chunk)` on each chunk of `out`; `work` is the number of elements of the whole pass.
pub(crate) fn for_each_chunk<T: Send>(
    out: &mut [T],
    chunk_len: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    let (chunk_len, len) = (chunk_len.max(1), out.len());
    let out = SharedBuffer::new(out);
    let change = |i: usize| {
        let start = i * chunk_len;
        let len = chunk_len.min(len - start);
        // SAFETY: each index comes once, and their chunks do not overlap.
        unsafe { out.change_row(start, len, |chunk| f(i, chunk)) };
    };
    let count = len.div_ceil(chunk_len);
    if work > INLINE_ELEMENTS {
        on_all_threads(count, &change);
    } else {
        (0..count).for_each(change);
    }
}

/// `f(i)` for `i` in `0..count`; `work` is the number of elements of the whole pass.
pub(crate) fn map_indices<R: Send>(
    count: usize,
    work: usize,
    f: impl Fn(usize) -> R + Sync,
) -> Vec<R> {
    let mut results = Vec::with_capacity(count);
    let spare = &mut results.spare_capacity_mut()[..count];
    for_each_chunk(spare, 1, work, |i, result| {
        result[0].write(f(i));
    });
    // SAFETY: each of these was written.
    unsafe { results.set_len(count) };
    results
}

/// Writes, or adds if `add`, the sum of the partial sums, each as long as `dst` and added in chunk order; in f64, so
/// that many partial sums cost no accuracy.
pub(crate) fn sum_partials(dst: &mut [f32], add: bool, partials: &[f32]) {
    let len = dst.len();
    vectorised(
        #[inline(always)]
        || {
            for (block, dst) in dst.chunks_mut(SUMMED_COLUMNS).enumerate() {
                let mut sums = [0f64; SUMMED_COLUMNS];
                if add {
                    for (sum, value) in sums.iter_mut().zip(&*dst) {
                        *sum = f64::from(*value);
                    }
                }
                for partial in partials.chunks_exact(len) {
                    let partial = &partial[block * SUMMED_COLUMNS..][..dst.len()];
                    for (sum, value) in sums.iter_mut().zip(partial) {
                        *sum += f64::from(*value);
                    }
                }
                for (dst, sum) in dst.iter_mut().zip(&sums) {
                    *dst = *sum as f32;
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::{INLINE_ELEMENTS, for_each_chunk, map_indices};
    use crate::cpu::filled::filled2;

    /// On one thread and on several: each element belongs to one chunk, the last of which may be shorter.
    #[test]
    fn chunks_are_all_of_a_slice() {
        for work in [0, 2 * INLINE_ELEMENTS] {
            for (len, chunk_len) in [(0, 3), (1, 3), (3, 3), (1000, 7), (1001, 0), (5, 9)] {
                let mut values = vec![0; len];
                for_each_chunk(&mut values, chunk_len, work, |i, chunk| {
                    assert!(chunk.len() <= chunk_len.max(1));
                    chunk.iter_mut().for_each(|value| *value += i + 1);
                });
                let want = (0..len).map(|i| i / chunk_len.max(1) + 1);
                assert!(values.into_iter().eq(want), "{len} in {chunk_len}, {work}");
            }
            let (a, b) = filled2((99, 4), (25, 1), work, |i, a: &mut [f32], b: &mut [f32]| {
                a.fill(i as f32);
                b[0] = i as f32;
            });
            assert!((0..99).map(|i| (i / 4) as f32).eq(a));
            assert!((0..25).map(|i| i as f32).eq(b));
            let texts = map_indices(1000, work, |i| i.to_string());
            assert!((0..1000).map(|i| i.to_string()).eq(texts));
        }
    }
}
