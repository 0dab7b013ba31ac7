//! Causal attention by blocks of query rows, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135).
//!
//! A thread holds the scores of one block only, of the keys that some row of it sees, the backward recomputes them from the log-sum-exp of each row, and
//! key/value heads are read where they are by each query head of their group. With `p` the probabilities and
//! `g = do v^T`: `dv = p^T do`, `ds = p (g - sum_j p_j g_j)`, `dq = scale ds k`, `dk = scale ds^T q`.

#![allow(unsafe_code)]

use crate::AttentionSpec;
use crate::chunks::{for_each_chunk, map_indices};
use crate::element::Element;
use crate::filled::{filled, zeros};
use crate::lanes;
use crate::matrix::{Matrix, SharedBuffer};
use crate::packed::{STEP, SmallProducts, Sums, with_small_products};
use crate::vectorised::vectorised;
use std::ops::Range;

/// Tasks that the backward is cut into at least, whatever the number of threads.
const MIN_TASKS: usize = 8;

/// Sizes of one call that passed the checks, with the passes over its blocks.
#[derive(Clone, Copy)]
pub(crate) struct AttentionBlocks<'a> {
    pub(crate) b: usize,
    pub(crate) t: usize,
    pub(crate) hq: usize,
    pub(crate) hkv: usize,
    pub(crate) d: usize,
    pub(crate) spec: &'a AttentionSpec,
}

impl AttentionBlocks<'_> {
    /// The positions from the first that some query of the block of `rows` rows from `first` on of sequence `b` sees, from where packed
    /// keys and values can be read, to the last.
    fn seen_by_block(&self, b: usize, first: usize, rows: usize) -> Range<usize> {
        self.spec.seen(b, first).start / STEP * STEP..first + rows
    }

    /// Which of the scores of positions from `start` on a query counts: those before and after are not its own.
    fn own(&self, b: usize, position: usize, start: usize) -> Range<usize> {
        let own = self.spec.seen(b, position);
        own.start - start..own.end - start
    }

    /// Where head `head` of `heads` starts at position `t` of sequence `b`.
    fn start(&self, b: usize, t: usize, head: usize, heads: usize) -> usize {
        ((b * self.t + t) * heads + head) * self.d
    }

    /// `rows` positions of one head from position `t` on.
    fn head<'v, T>(
        &self,
        values: &'v [T],
        (b, t, rows): (usize, usize, usize),
        (head, heads): (usize, usize),
    ) -> Matrix<'v, T> {
        // Of no positions there are none to start at.
        let values = values.get(self.start(b, t, head, heads)..);
        Matrix::new(values.unwrap_or_default(), rows, self.d, heads * self.d)
    }

    /// Each key/value head of each sequence, packed as `of` makes it of the matrix (t, d), once for all blocks of all query heads.
    fn packed<T: Element, P: SmallProducts>(
        &self,
        values: &[T],
        of: impl Fn(Matrix<'_, T>) -> P::Rhs + Sync,
    ) -> Vec<P::Rhs> {
        map_indices(self.b * self.hkv, self.num_scores(), |i| {
            let (b, head) = (i / self.hkv, i % self.hkv);
            of(self.head(values, (b, 0, self.t), (head, self.hkv)))
        })
    }

    /// Scores computed in one pass over all heads.
    fn num_scores(&self) -> usize {
        self.b * self.hq * self.t * self.spec.window_of(self.t)
    }

    /// The output and the log-sum-exp `(b, hq, t)` of the scaled scores.
    pub(crate) fn forward<T: Element>(&self, values: [&[T]; 3]) -> (Vec<T>, Vec<f32>) {
        with_small_products!(T, P => self.forward_by::<T, P>(values))
    }

    fn forward_by<T: Element, P: SmallProducts>(&self, values: [&[T]; 3]) -> (Vec<T>, Vec<f32>) {
        let [q, k, v] = values;
        let mut out = zeros(q.len());
        let k_t = self.packed::<T, P>(k, |k| P::pack(k.t()));
        let v = self.packed::<T, P>(v, P::pack);
        let mut lse = vec![0f32; self.b * self.hq * self.t];
        let shared = SharedBuffer::new(&mut out);
        let work = self.num_scores();
        for_each_chunk(&mut lse, self.t, work, |i, lse| {
            let (b, head) = (i / self.hq, i % self.hq);
            let kv = b * self.hkv + self.spec.groups.kv_head(head);
            for_each_chunk(lse, P::BLOCK_ROWS, work, |block, lse| {
                let (first, rows) = (block * P::BLOCK_ROWS, lse.len());
                let seen = self.seen_by_block(b, first, rows);
                let q = self.head(q, (b, first, rows), (head, self.hq));
                let mut weights = Sums::new(rows, seen.len());
                P::multiply(
                    weights.rows_from(0),
                    false,
                    q,
                    &k_t[kv],
                    0..self.d,
                    seen.clone(),
                );
                let mut inverse_sums = [0f32; STEP];
                vectorised(
                    #[inline(always)]
                    || {
                        let rows = weights.rows_mut();
                        let rows = rows.zip(lse.iter_mut().zip(&mut inverse_sums));
                        for (row, (weights, (lse, inverse))) in rows.enumerate() {
                            let own = keep(weights, self.own(b, first + row, seen.start));
                            let (max, sum) = exponentials(own, self.spec.scale);
                            (*lse, *inverse) = (max + sum.ln(), 1.0 / sum);
                        }
                    },
                );
                let weights = weights.matrix(rows, seen.len());
                let mut sums = Sums::new(rows, self.d);
                P::multiply(sums.rows_from(0), false, weights, &v[kv], seen, 0..self.d);
                let rows = sums.rows(0..rows).zip(inverse_sums);
                let start = self.start(b, first, head, self.hq);
                // SAFETY: every (b, head, block of rows) is visited by one task, and these are its elements only.
                unsafe { shared.write_rows(start, self.hq * self.d, self.d, rows) };
            });
        });
        (out, lse)
    }

    /// Parts that the rows which read one key/value head are cut into: a function of the shape, so that the sums are
    /// the same for any number of threads.
    fn num_parts(&self, block_rows: usize) -> usize {
        let parts = MIN_TASKS.div_ceil((self.b * self.hkv).max(1));
        parts.min(self.t.div_ceil(block_rows)).max(1)
    }

    /// The gradients of q, k and v.
    pub(crate) fn backward<T: Element>(
        &self,
        values: [&[T]; 3],
        lse: &[f32],
        grad: &[T],
    ) -> [Vec<T>; 3] {
        with_small_products!(T, P => self.backward_by::<T, P>(values, lse, grad))
    }

    /// Each (part, sequence, key/value head) is one task, which adds the contributions of its blocks in order to gradients of its own;
    /// those of the parts are added at the end, in order too.
    fn backward_by<T: Element, P: SmallProducts>(
        &self,
        [q, k, v]: [&[T]; 3],
        lse: &[f32],
        grad: &[T],
    ) -> [Vec<T>; 3] {
        let k_t = self.packed::<T, P>(k, |k| P::pack(k.t()));
        let v_t = self.packed::<T, P>(v, |v| P::pack(v.t()));
        let k = self.packed::<T, P>(k, P::pack);
        let parts = self.num_parts(P::BLOCK_ROWS);
        let num_heads = self.b * self.hkv;
        let mut dq = zeros(q.len());
        let shared = SharedBuffer::new(&mut dq);
        let task = |i: usize| {
            let (part, b, kv_head) = (i / num_heads, i / self.hkv % self.b, i % self.hkv);
            let kv = i % num_heads;
            let [mut dk, mut dv] = [(), ()].map(|()| Sums::zeros(self.t, self.d));
            for (head, first) in self.blocks_of(kv_head, part, (parts, P::BLOCK_ROWS)) {
                let rows = P::BLOCK_ROWS.min(self.t - first);
                let seen = self.seen_by_block(b, first, rows);
                let lse = &lse[(b * self.hq + head) * self.t + first..][..rows];
                let q = self.head(q, (b, first, rows), (head, self.hq));
                let grad = self.head(grad, (b, first, rows), (head, self.hq));
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
                            let own = self.own(b, first + row, seen.start);
                            let (p, ds) = (keep(p, own.clone()), keep(ds, own));
                            softmax_backward(p, ds, *lse, self.spec.scale);
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
                let rows = sums.rows(0..rows).map(|row| (row, 1.0));
                let start = self.start(b, first, head, self.hq);
                // SAFETY: the blocks of rows of dq that `blocks_of` deals to this part of this head are only its own.
                unsafe { shared.write_rows(start, self.hq * self.d, self.d, rows) };
            }
            [dk, dv]
        };
        let sums = map_indices(parts * num_heads, self.num_scores(), task);
        let [dk, dv] = [0, 1].map(|which| {
            let row_len = self.hkv * self.d;
            filled(
                self.b * self.t * row_len,
                row_len,
                self.num_scores(),
                |row, out| {
                    let (b, position) = (row / self.t, row % self.t);
                    for (head, out) in out.chunks_exact_mut(self.d).enumerate() {
                        let of_part =
                            |part: usize| &sums[(part * self.b + b) * self.hkv + head][which];
                        for (i, out) in out.iter_mut().enumerate() {
                            let value = |part| of_part(part).row(position)[i];
                            let first = value(0);
                            *out =
                                T::nearest((1..parts).fold(first, |sum, part| sum + value(part)));
                        }
                    }
                },
            )
        });
        [dq, dk, dv]
    }

    /// `(query head, first row)` of each block that `part` of `parts` works on for one key/value head. Later blocks
    /// are longer, up to the window, so they are dealt to and fro.
    fn blocks_of(
        &self,
        kv_head: usize,
        part: usize,
        (parts, block_rows): (usize, usize),
    ) -> impl Iterator<Item = (usize, usize)> {
        let heads = self.spec.groups.q_heads(kv_head, self.hq);
        let starts = (0..self.t).step_by(block_rows);
        let blocks = heads.flat_map(move |head| starts.clone().map(move |first| (head, first)));
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
