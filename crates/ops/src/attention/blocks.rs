//! Causal attention by blocks of query rows, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135).
//!
//! A thread holds the scores of one block only, of the keys that some row of it sees, the backward recomputes them from the log-sum-exp of each row, and
//! key/value heads are read where they are by each query head of their group. With `p` the probabilities and
//! `g = do v^T`: `dv = p^T do`, `ds = p (g - sum_j p_j g_j)`, `dq = scale ds k`, `dk = scale ds^T q`. Where the keys are a part of those that a query sees, the sum
//! over all of them is given: that of the products of the whole output and its gradient.

#![allow(unsafe_code)]

use super::runs::{AttentionRows, Runs, SequenceRows};
use super::spec::AttentionSpec;
use crate::cpu::chunks::{for_each_chunk, map_indices};
use crate::cpu::element::Element;
use crate::cpu::filled::zeros;
use crate::cpu::lanes;
use crate::cpu::shared_buffer::SharedBuffer;
use crate::cpu::vectorised::vectorised;
use crate::product::matrix::Matrix;
use crate::product::small::{STEP, SmallProducts, Sums, with_small_products};
use std::ops::Range;

/// Tasks that the backward is cut into at least, whatever the number of threads.
const MIN_TASKS: usize = 8;

/// Sizes of one call that passed the checks, with the passes over its blocks.
pub(crate) struct AttentionBlocks<'a> {
    pub(crate) b: usize,
    /// Positions of each sequence of queries.
    pub(crate) t: usize,
    pub(crate) hq: usize,
    hkv: usize,
    d: usize,
    spec: &'a AttentionSpec,
    sequences: Vec<SequenceRows>,
    /// Of each query the keys of its sequence that it sees.
    seen: Vec<Range<u32>>,
    /// Scores computed in one pass over all heads.
    num_scores: usize,
}

/// Queries of one sequence whose scores a thread holds.
struct QueryBlock {
    sequence: usize,
    first: usize,
    rows: usize,
    /// Keys of the sequence, from where packed keys and values can be read; none if no query sees one.
    seen: Range<usize>,
}

impl<'a> AttentionBlocks<'a> {
    /// For queries of `(b, t)` positions and keys of `(b, tk)`, which `spec` was checked with.
    pub(crate) fn new(
        (b, t, tk): (usize, usize, usize),
        (hq, hkv, d): (usize, usize, usize),
        spec: &'a AttentionSpec,
    ) -> Self {
        let plain = || AttentionRows::new(Runs::sequences(b, t), Runs::sequences(b, tk));
        let rows = spec.rows.clone().unwrap_or_else(plain);
        let seen = rows.seen(spec.window);
        let num_pairs: usize = seen.iter().map(ExactSizeIterator::len).sum();
        Self {
            b,
            t,
            hq,
            hkv,
            d,
            spec,
            sequences: rows.sequences(),
            seen,
            num_scores: hq * num_pairs,
        }
    }

    /// The blocks of all sequences, one after the other.
    fn blocks(&self, block_rows: usize) -> Vec<QueryBlock> {
        let of_sequence = |(sequence, rows): (usize, &SequenceRows)| {
            let end = rows.queries.end;
            let firsts = rows.queries.clone().step_by(block_rows);
            let num_keys = rows.keys.len();
            let block = move |first| {
                let rows = block_rows.min(end - first);
                let seen = self.seen[first..][..rows].iter();
                let seen = seen.filter(|seen| !seen.is_empty());
                let start = seen.clone().map(|seen| seen.start).min().unwrap_or(0) as usize;
                let end = seen.map(|seen| seen.end).max().unwrap_or(0) as usize;
                // Whole steps, as a product of fewer rows spoils the sums of the keys of the last one.
                let end = end.next_multiple_of(STEP).min(num_keys);
                QueryBlock {
                    sequence,
                    first,
                    rows,
                    seen: start / STEP * STEP..end,
                }
            };
            firsts.map(block).collect::<Vec<_>>()
        };
        let sequences = self.sequences.iter().enumerate();
        sequences.flat_map(of_sequence).collect()
    }

    /// Which of the scores of a block a query counts: those before and after are not its own.
    fn own(&self, block: &QueryBlock, row: usize) -> Range<usize> {
        let own = &self.seen[block.first + row];
        match own.is_empty() {
            true => 0..0,
            false => own.start as usize - block.seen.start..own.end as usize - block.seen.start,
        }
    }

    /// Where a row of head `head` of `heads` starts.
    fn start(&self, row: usize, head: usize, heads: usize) -> usize {
        (row * heads + head) * self.d
    }

    /// Where the numbers of a query's head lie in (b, hq, t).
    fn place(&self, row: usize, head: usize) -> usize {
        let t = self.t.max(1);
        (row / t * self.hq + head) * t + row % t
    }

    /// Rows of one head.
    fn head<'v, T>(
        &self,
        values: &'v [T],
        rows: Range<usize>,
        (head, heads): (usize, usize),
    ) -> Matrix<'v, T> {
        // Of no positions there are none to start at.
        let values = values.get(self.start(rows.start, head, heads)..);
        Matrix::new(
            values.unwrap_or_default(),
            rows.len(),
            self.d,
            heads * self.d,
        )
    }

    /// Each key/value head of each sequence, packed as `of` makes it of the matrix (rows, d), once for all blocks of all query heads.
    fn packed<T: Element, P: SmallProducts>(
        &self,
        values: &[T],
        of: impl Fn(Matrix<'_, T>) -> P::Rhs + Sync,
    ) -> Vec<P::Rhs> {
        map_indices(self.sequences.len() * self.hkv, self.num_scores, |i| {
            let rows = self.sequences[i / self.hkv].keys.clone();
            of(self.head(values, rows, (i % self.hkv, self.hkv)))
        })
    }

    /// The output and the log-sum-exp `(b, hq, t)` of the scaled scores: zeros and minus infinity of a query that sees no key.
    pub(crate) fn forward<T: Element, O: Element>(&self, values: [&[T]; 3]) -> (Vec<O>, Vec<f32>) {
        with_small_products!(T, P => self.forward_by::<T, O, P>(values))
    }

    fn forward_by<T: Element, O: Element, P: SmallProducts>(
        &self,
        [q, k, v]: [&[T]; 3],
    ) -> (Vec<O>, Vec<f32>) {
        let mut out = zeros(q.len());
        let k_t = self.packed::<T, P>(k, |k| P::pack(k.t()));
        let v = self.packed::<T, P>(v, P::pack);
        let mut lse = vec![f32::NEG_INFINITY; self.b * self.hq * self.t];
        let (out_rows, lse_rows) = (SharedBuffer::new(&mut out), SharedBuffer::new(&mut lse));
        let blocks = self.blocks(P::BLOCK_ROWS);
        map_indices(self.hq * blocks.len(), self.num_scores, |i| {
            let (head, block) = (i / blocks.len(), &blocks[i % blocks.len()]);
            let (rows, seen) = (block.rows, block.seen.clone());
            if seen.is_empty() {
                return;
            }
            let kv = block.sequence * self.hkv + self.spec.groups.kv_head(head);
            let q = self.head(q, block.first..block.first + rows, (head, self.hq));
            let mut weights = Sums::new(rows, seen.len());
            P::multiply(
                weights.rows_from(0),
                false,
                q,
                &k_t[kv],
                0..self.d,
                seen.clone(),
            );
            let (mut lse, mut inverse_sums) = ([f32::NEG_INFINITY; STEP], [0f32; STEP]);
            vectorised(
                #[inline(always)]
                || {
                    let rows = weights.rows_mut().take(rows);
                    let rows = rows.zip(lse.iter_mut().zip(&mut inverse_sums));
                    for (row, (weights, (lse, inverse))) in rows.enumerate() {
                        let own = keep(weights, self.own(block, row));
                        if own.is_empty() {
                            continue;
                        }
                        let (max, sum) = exponentials(own, self.spec.scale);
                        (*lse, *inverse) = (max + sum.ln(), 1.0 / sum);
                    }
                },
            );
            let weights = weights.matrix(rows, seen.len());
            let mut sums = Sums::new(rows, self.d);
            P::multiply(sums.rows_from(0), false, weights, &v[kv], seen, 0..self.d);
            let sums = sums.rows(0..rows).zip(inverse_sums);
            let start = self.start(block.first, head, self.hq);
            let lse = [(&lse[..rows], 1.0)];
            // SAFETY: every (head, block of rows) is visited by one task, and these are its elements only.
            unsafe {
                out_rows.put_rows::<false>(start, self.hq * self.d, self.d, sums);
                lse_rows.put_rows::<false>(self.place(block.first, head), 0, rows, lse.into_iter());
            }
        });
        (out, lse)
    }

    /// Parts that the rows which read one key/value head are cut into: a function of the shape, so that the sums are
    /// the same for any number of threads.
    fn num_parts(&self, block_rows: usize) -> usize {
        let parts = MIN_TASKS.div_ceil((self.sequences.len() * self.hkv).max(1));
        let longest = self.sequences.iter().map(|rows| rows.queries.len()).max();
        parts.min(longest.unwrap_or(0).div_ceil(block_rows)).max(1)
    }

    /// The gradients of q, k and v, of which all keys that a query sees are here.
    pub(crate) fn backward<T: Element>(
        &self,
        values: [&[T]; 3],
        log_sum_exp: &[f32],
        grad: &[T],
    ) -> [Vec<T>; 3] {
        let mut gradients = values.map(|values| zeros(values.len()));
        let of = gradients.each_mut().map(|gradient| &mut gradient[..]);
        with_small_products!(T, P => {
            self.backward_by::<T, T, P>(values, (log_sum_exp, None), grad, of, false);
            gradients
        })
    }

    /// Adds to the gradients of q, k and v what these keys give, of those that queries see; if they are a part of these,
    /// `numbers` has beside the log-sum-exps the product of each query's output and its gradient.
    pub(crate) fn add_backward<T: Element>(
        &self,
        values: [&[T]; 3],
        numbers: (&[f32], Option<&[f32]>),
        grad: &[T],
        gradients: [&mut [f32]; 3],
    ) {
        with_small_products!(T, P => {
            self.backward_by::<T, f32, P>(values, numbers, grad, gradients, true)
        })
    }

    /// Each (part, sequence, key/value head) is one task, which adds the contributions of its blocks in order to gradients of its own;
    /// those of the parts are added at the end, in order too. The gradients are new ones, or sums to add to.
    fn backward_by<T: Element, O: Element, P: SmallProducts>(
        &self,
        [q, k, v]: [&[T]; 3],
        (log_sum_exp, delta): (&[f32], Option<&[f32]>),
        grad: &[T],
        [dq, dk, dv]: [&mut [O]; 3],
        are_sums: bool,
    ) {
        let k_t = self.packed::<T, P>(k, |k| P::pack(k.t()));
        let v_t = self.packed::<T, P>(v, |v| P::pack(v.t()));
        let k = self.packed::<T, P>(k, P::pack);
        let parts = self.num_parts(P::BLOCK_ROWS);
        let blocks = self.blocks(P::BLOCK_ROWS);
        let num_heads = self.sequences.len() * self.hkv;
        let shared = SharedBuffer::new(dq);
        let task = |i: usize| {
            let (part, kv) = (i / num_heads, i % num_heads);
            let (sequence, kv_head) = (kv / self.hkv, kv % self.hkv);
            let num_keys = self.sequences[sequence].keys.len();
            let [mut dk, mut dv] = [(), ()].map(|()| Sums::zeros(num_keys, self.d));
            let of_sequence = blocks.iter().filter(|block| block.sequence == sequence);
            for (head, block) in self.dealt(of_sequence, kv_head, part, parts) {
                let (rows, seen) = (block.rows, block.seen.clone());
                if seen.is_empty() {
                    continue;
                }
                let first = self.place(block.first, head);
                let lse = &log_sum_exp[first..][..rows];
                let delta = delta.map(|delta| &delta[first..][..rows]);
                let of_block = block.first..block.first + rows;
                let q = self.head(q, of_block.clone(), (head, self.hq));
                let grad = self.head(grad, of_block, (head, self.hq));
                let (mut p, mut ds) = (Sums::new(rows, seen.len()), Sums::new(rows, seen.len()));
                P::multiply(p.rows_from(0), false, q, &k_t[kv], 0..self.d, seen.clone());
                P::multiply(
                    ds.rows_from(0),
                    false,
                    grad,
                    &v_t[kv],
                    0..self.d,
                    seen.clone(),
                );
                vectorised(
                    #[inline(always)]
                    || {
                        let p = p.rows_mut();
                        let ds = ds.rows_mut();
                        for (row, ((p, ds), lse)) in p.zip(ds).zip(lse).enumerate() {
                            let own = self.own(block, row);
                            let (p, ds) = (keep(p, own.clone()), keep(ds, own));
                            match delta {
                                None => softmax_backward(p, ds, *lse, self.spec.scale),
                                Some(delta) => softmax_backward_of_part(
                                    p,
                                    ds,
                                    *lse,
                                    delta[row],
                                    self.spec.scale,
                                ),
                            }
                        }
                    },
                );
                let (p, ds) = (p.matrix(rows, seen.len()), ds.matrix(rows, seen.len()));
                let all = 0..self.d;
                let (grad, q) = (P::pack(grad), P::pack(q));
                P::multiply(
                    dv.rows_from(seen.start),
                    true,
                    p.t(),
                    &grad,
                    0..rows,
                    all.clone(),
                );
                P::multiply(
                    dk.rows_from(seen.start),
                    true,
                    ds.t(),
                    &q,
                    0..rows,
                    all.clone(),
                );
                let mut sums = Sums::new(rows, self.d);
                P::multiply(sums.rows_from(0), false, ds, &k[kv], seen, all);
                let sums = sums.rows(0..rows).map(|row| (row, 1.0));
                let start = self.start(block.first, head, self.hq);
                let row_stride = self.hq * self.d;
                // SAFETY: the blocks of rows of dq that are dealt to this part of this head are only its own.
                unsafe {
                    match are_sums {
                        true => shared.put_rows::<true>(start, row_stride, self.d, sums),
                        false => shared.put_rows::<false>(start, row_stride, self.d, sums),
                    }
                }
            }
            [dk, dv]
        };
        let sums = map_indices(parts * num_heads, self.num_scores, task);
        let row_len = self.hkv * self.d;
        for (which, out) in [dk, dv].into_iter().enumerate() {
            for_each_chunk(out, row_len, self.num_scores, |row, out| {
                let before = |rows: &SequenceRows| rows.keys.end <= row;
                let sequence = self.sequences.partition_point(before);
                let position = row - self.sequences[sequence].keys.start;
                for (head, out) in out.chunks_exact_mut(self.d).enumerate() {
                    let of_part =
                        |part: usize| &sums[part * num_heads + sequence * self.hkv + head][which];
                    for (i, out) in out.iter_mut().enumerate() {
                        let value = |part| of_part(part).row(position)[i];
                        let first = value(0);
                        let sum = (1..parts).fold(first, |sum, part| sum + value(part));
                        *out = O::nearest(if are_sums { out.widen() + sum } else { sum });
                    }
                }
            });
        }
    }

    /// `(query head, block)` of each of a sequence's blocks that `part` of `parts` works on for one key/value head. Later blocks
    /// are longer, up to the window, so they are dealt to and fro.
    fn dealt<'b>(
        &self,
        blocks: impl Iterator<Item = &'b QueryBlock> + Clone,
        kv_head: usize,
        part: usize,
        parts: usize,
    ) -> impl Iterator<Item = (usize, &'b QueryBlock)> {
        let heads = self.spec.groups.q_heads(kv_head, self.hq);
        let blocks = heads.flat_map(move |head| blocks.clone().map(move |block| (head, block)));
        let is_dealt = move |i: usize| match i / parts % 2 {
            0 => i % parts == part,
            _ => parts - 1 - i % parts == part,
        };
        blocks
            .enumerate()
            .filter(move |(i, _)| is_dealt(*i))
            .map(|(_, block)| block)
    }
}

/// The `own` values of a row; 0 for the others.
#[inline(always)]
fn keep(row: &mut [f32], own: Range<usize>) -> &mut [f32] {
    row[..own.start].fill(0.0);
    row[own.end..].fill(0.0);
    &mut row[own]
}

/// Turns scores into `exp(scale * score - max)` in place; returns `max`, that of the scaled scores, and their sum.
#[inline(always)]
fn exponentials(scores: &mut [f32], scale: f32) -> (f32, f32) {
    let max = lanes::max(scores, |score| score * scale);
    let sum = lanes::replace_by_exp(scores, |score| score * scale - max);
    (max, sum)
}

/// Turns raw scores into probabilities and the gradient of the probabilities into that of the raw scores, in place.
#[inline(always)]
fn softmax_backward(p: &mut [f32], ds: &mut [f32], lse: f32, scale: f32) {
    let (sum, dot) = lanes::replace_by_exp_and_dot(p, ds, |score| score * scale - lse);
    // The sum is 1 but for rounding; with it the gradients of a row of scores add up to 0 as they should, and so do those of a bias of
    // the keys, of which little else is left.
    let along_p = dot / sum;
    for (p, ds) in p.iter().zip(ds.iter_mut()) {
        *ds = *p * (*ds - along_p) * scale;
    }
}

/// The same for a part of the keys that a query sees, where the sum over all of them, `delta`, is known.
#[inline(always)]
fn softmax_backward_of_part(p: &mut [f32], ds: &mut [f32], lse: f32, delta: f32, scale: f32) {
    lanes::replace_by_exp(p, |score| score * scale - lse);
    for (p, ds) in p.iter().zip(ds.iter_mut()) {
        *ds = *p * (*ds - delta) * scale;
    }
}
