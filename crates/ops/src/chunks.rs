//! Cutting a pass over memory into chunks for the cores, the same way whatever the number of threads.

use crate::vectorised::vectorised;
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

/// Whether a pass over `work` elements is worth more than one thread.
fn is_parallel(work: usize) -> bool {
    work > INLINE_ELEMENTS
}

/// Calls `f(i, chunk)` on each chunk of `out`; `work` is the number of elements of the whole pass.
pub(crate) fn for_each_chunk<T: Send>(
    out: &mut [T],
    chunk_len: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    let chunk_len = chunk_len.max(1);
    if is_parallel(work) {
        out.par_chunks_mut(chunk_len)
            .enumerate()
            .for_each(|(i, chunk)| f(i, chunk));
    } else {
        out.chunks_mut(chunk_len)
            .enumerate()
            .for_each(|(i, chunk)| f(i, chunk));
    }
}

/// Calls `f(i, chunk of a, chunk of b)` on each pair of chunks of two buffers with equally many chunks.
pub(crate) fn for_each_chunk2<A: Send, B: Send>(
    (a, a_len): (&mut [A], usize),
    (b, b_len): (&mut [B], usize),
    work: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Send + Sync,
) {
    let (a_len, b_len) = (a_len.max(1), b_len.max(1));
    if is_parallel(work) {
        let pairs = a.par_chunks_mut(a_len).zip(b.par_chunks_mut(b_len));
        pairs.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    } else {
        let pairs = a.chunks_mut(a_len).zip(b.chunks_mut(b_len));
        pairs.enumerate().for_each(|(i, (a, b))| f(i, a, b));
    }
}

/// `f(i)` for `i` in `0..count`; `work` is the number of elements of the whole pass.
pub(crate) fn map_indices<R: Send>(
    count: usize,
    work: usize,
    f: impl Fn(usize) -> R + Send + Sync,
) -> Vec<R> {
    if is_parallel(work) {
        (0..count).into_par_iter().map(f).collect()
    } else {
        (0..count).map(f).collect()
    }
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
