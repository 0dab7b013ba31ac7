//! Causal attention by blocks of query rows, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135).
//!
//! A thread holds the scores of one block only, of the keys that some row of it sees, the backward recomputes them from the log-sum-exp of each row, and
//! key/value heads are read where they are by each query head of their group. With `p` the probabilities and
//! `g = do v^T`: `dv = p^T do`, `ds = p (g - sum_j p_j g_j)`, `dq = scale ds k`, `dk = scale ds^T q`.

#![allow(unsafe_code)]

use crate::AttentionSpec;
use crate::chunks::{for_each_chunk, for_each_index, rows_per_chunk};
use crate::filled::{filled, zeros};
use crate::lanes;
use crate::matrix::{Matrix, MatrixMut, SharedBuffer, product};
use crate::vectorised::vectorised;
use std::ops::Range;

/// Query rows worked on at a time. More rows make better products, but more scores that only some of them see, to throw away.
const BLOCK_ROWS: usize = 32;
/// Positions transposed at a time: what is read of them stays in the first-level cache.
const TRANSPOSED_ROWS: usize = 16;
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
    /// The positions that some query of the block of `rows` rows from `first` on of sequence `b` sees.
    fn seen_by_block(&self, b: usize, first: usize, rows: usize) -> Range<usize> {
        self.spec.seen(b, first).start..first + rows
    }

    /// Which of the scores of such a block one of its rows counts: those before and after are not its own.
    fn own(&self, b: usize, first: usize, row: usize) -> Range<usize> {
        let (block, own) = (self.spec.seen(b, first), self.spec.seen(b, first + row));
        own.start - block.start..own.end - block.start
    }

    /// Where head `head` of `heads` starts at position `t` of sequence `b`.
    fn start(&self, b: usize, t: usize, head: usize, heads: usize) -> usize {
        ((b * self.t + t) * heads + head) * self.d
    }

    /// `rows` positions of one head from position `t` on.
    fn head<'v>(
        &self,
        values: &'v [f32],
        (b, t, rows): (usize, usize, usize),
        (head, heads): (usize, usize),
    ) -> Matrix<'v> {
        let values = &values[self.start(b, t, head, heads)..];
        Matrix::new(values, rows, self.d, heads * self.d)
    }

    /// A copy of keys or values as `(b, hkv, d, t)`: gemm reads the left side of the scores along the positions, and
    /// would otherwise transpose them anew, slowly, for each block of each query head.
    fn transposed(&self, values: &[f32]) -> Vec<f32> {
        let (t, d) = (self.t, self.d);
        filled(values.len(), t * d, values.len(), |i, out| {
            let (b, head) = (i / self.hkv, i % self.hkv);
            for first in (0..t).step_by(TRANSPOSED_ROWS) {
                let rows = TRANSPOSED_ROWS.min(t - first);
                let start = self.start(b, first, head, self.hkv);
                for (c, out) in out.chunks_exact_mut(t).enumerate() {
                    let column = values[start + c..].iter().step_by(self.hkv * d);
                    for (out, value) in out[first..first + rows].iter_mut().zip(column) {
                        *out = *value;
                    }
                }
            }
        })
    }

    /// The positions `seen` of one head of what [`Self::transposed`] returned.
    fn transposed_head<'v>(
        &self,
        values: &'v [f32],
        (b, head): (usize, usize),
        seen: &Range<usize>,
    ) -> Matrix<'v> {
        let start = (b * self.hkv + head) * self.d * self.t;
        Matrix::new(&values[start..], self.d, self.t, self.t).columns(seen.start, seen.len())
    }

    /// Scores computed in one pass over all heads.
    fn num_scores(&self) -> usize {
        self.b * self.hq * self.t * self.spec.window_of(self.t)
    }

    /// The output and the log-sum-exp `(b, hq, t)` of the scaled scores.
    pub(crate) fn forward(&self, values: [&[f32]; 3]) -> (Vec<f32>, Vec<f32>) {
        let [q, k, v] = values;
        let mut out = zeros(q.len());
        let k_t = self.transposed(k);
        let mut lse = vec![0f32; self.b * self.hq * self.t];
        let shared = SharedBuffer::new(&mut out);
        let work = self.num_scores();
        for_each_chunk(&mut lse, self.t, work, |i, lse| {
            let (b, head) = (i / self.hq, i % self.hq);
            for_each_chunk(lse, BLOCK_ROWS, work, |block, lse| {
                let (first, rows) = (block * BLOCK_ROWS, lse.len());
                let start = self.start(b, first, head, self.hq);
                // SAFETY: every (b, head, block of rows) is visited by one task, and these are its elements only.
                let out = unsafe { shared.matrix(start, rows, self.d, self.hq * self.d) };
                self.forward_block([q, &k_t, v], (b, head, first), out, lse);
            });
        });
        (out, lse)
    }

    /// The rows of `out` and `lse` from position `first` on, for one query head.
    fn forward_block(
        &self,
        [q, k_t, v]: [&[f32]; 3],
        (b, head, first): (usize, usize, usize),
        mut out: MatrixMut<'_>,
        lse: &mut [f32],
    ) {
        let kv = (self.spec.groups.kv_head(head), self.hkv);
        let rows = lse.len();
        let seen = self.seen_by_block(b, first, rows);
        let q = self.head(q, (b, first, rows), (head, self.hq));
        let mut weights = product(q, self.transposed_head(k_t, (b, kv.0), &seen));
        let mut inverse_sums = [0f32; BLOCK_ROWS];
        vectorised(
            #[inline(always)]
            || {
                let rows = weights.chunks_exact_mut(seen.len()).zip(&mut *lse);
                for (row, ((weights, lse), inverse)) in rows.zip(&mut inverse_sums).enumerate() {
                    let own = keep(weights, self.own(b, first, row));
                    let (max, sum) = exponentials(own, self.spec.scale);
                    (*lse, *inverse) = (max + sum.ln(), 1.0 / sum);
                }
            },
        );
        let weights = Matrix::new(&weights, rows, seen.len(), seen.len());
        out.set_product(weights, self.head(v, (b, seen.start, seen.len()), kv));
        out.scale_rows(&inverse_sums[..rows]);
    }

    /// Parts that the rows which read one key/value head are cut into: a function of the shape, so that the sums are
    /// the same for any number of threads.
    fn num_parts(&self) -> usize {
        let parts = MIN_TASKS.div_ceil((self.b * self.hkv).max(1));
        parts.min(self.t.div_ceil(BLOCK_ROWS)).max(1)
    }

    /// The gradients of q, k and v. Each (part, sequence, key/value head) is one task, which adds the contributions of
    /// its blocks in order to gradients of its own; those of the parts are added at the end, in order too.
    pub(crate) fn backward(&self, values: [&[f32]; 3], lse: &[f32], grad: &[f32]) -> [Vec<f32>; 3] {
        let [q, k, v] = values;
        let (k_t, v_t) = (self.transposed(k), self.transposed(v));
        let parts = self.num_parts();
        let mut dq = zeros(q.len());
        let (mut dk, mut dv) = (zeros(parts * k.len()), zeros(parts * k.len()));
        let shared = [&mut dq, &mut dk, &mut dv].map(|x| SharedBuffer::new(x));
        for_each_index(parts * self.b * self.hkv, self.num_scores(), |i| {
            let (part, b, kv_head) = (i / self.hkv / self.b, i / self.hkv % self.b, i % self.hkv);
            for (head, first) in self.blocks_of(kv_head, part, parts) {
                let rows = BLOCK_ROWS.min(self.t - first);
                let seen = self.seen_by_block(b, first, rows);
                let kv_start = part * k.len() + self.start(b, seen.start, kv_head, self.hkv);
                let (q_step, kv_step) = (self.hq * self.d, self.hkv * self.d);
                let q_start = self.start(b, first, head, self.hq);
                let [dq, dk, dv] = &shared;
                // SAFETY: one task owns a (part, b, kv_head): its own elements of dk and dv, and the blocks of rows of
                // dq that `blocks_of` deals to this part only. It makes the three matrices anew for each block.
                let grads = unsafe {
                    [
                        dq.matrix(q_start, rows, self.d, q_step),
                        dk.matrix(kv_start, seen.len(), self.d, kv_step),
                        dv.matrix(kv_start, seen.len(), self.d, kv_step),
                    ]
                };
                let lse = &lse[(b * self.hq + head) * self.t + first..][..rows];
                let inputs = [q, k, &k_t, &v_t, grad];
                self.backward_block(inputs, (b, head, first), lse, grads);
            }
        });
        [dq, add_parts(dk, k.len()), add_parts(dv, k.len())]
    }

    /// `(query head, first row)` of each block that `part` of `parts` works on for one key/value head. Later blocks
    /// are longer, up to the window, so they are dealt to and fro.
    fn blocks_of(
        &self,
        kv_head: usize,
        part: usize,
        parts: usize,
    ) -> impl Iterator<Item = (usize, usize)> {
        let heads = self.spec.groups.q_heads(kv_head, self.hq);
        let starts = (0..self.t).step_by(BLOCK_ROWS);
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

    /// What one block of rows of one query head contributes to the gradients.
    fn backward_block(
        &self,
        [q, k, k_t, v_t, grad]: [&[f32]; 5],
        (b, head, first): (usize, usize, usize),
        lse: &[f32],
        [mut dq, mut dk, mut dv]: [MatrixMut<'_>; 3],
    ) {
        let rows = lse.len();
        let seen = self.seen_by_block(b, first, rows);
        let kv = (self.spec.groups.kv_head(head), self.hkv);
        let q = self.head(q, (b, first, rows), (head, self.hq));
        let grad = self.head(grad, (b, first, rows), (head, self.hq));
        let k = self.head(k, (b, seen.start, seen.len()), kv);
        let mut p = product(q, self.transposed_head(k_t, (b, kv.0), &seen));
        let mut ds = product(grad, self.transposed_head(v_t, (b, kv.0), &seen));
        let seen = seen.len();
        vectorised(
            #[inline(always)]
            || {
                let rows = p.chunks_exact_mut(seen).zip(ds.chunks_exact_mut(seen));
                for (row, ((p, ds), lse)) in rows.zip(lse).enumerate() {
                    let own = self.own(b, first, row);
                    let (p, ds) = (keep(p, own.clone()), keep(ds, own));
                    softmax_backward(p, ds, *lse, self.spec.scale);
                }
            },
        );
        let p = Matrix::new(&p, rows, seen, seen);
        let ds = Matrix::new(&ds, rows, seen, seen);
        dv.add_product(p.t(), grad);
        dq.set_product(ds, k);
        dk.add_product(ds.t(), q);
    }
}

/// The sum of the parts of `len` elements, in order.
fn add_parts(mut parts: Vec<f32>, len: usize) -> Vec<f32> {
    let work = parts.len();
    let (sum, rest) = parts.split_at_mut(len);
    if !rest.is_empty() {
        let chunk_len = rows_per_chunk(1);
        for_each_chunk(sum, chunk_len, work, |chunk, sum| {
            for part in rest.chunks_exact(len) {
                let part = &part[chunk * chunk_len..][..sum.len()];
                for (sum, value) in sum.iter_mut().zip(part) {
                    *sum += value;
                }
            }
        });
        parts.truncate(len);
    }
    parts
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
    let along_p = lanes::replace_by_exp_and_dot(p, ds, |score| score * scale - lse);
    for (p, ds) in p.iter().zip(ds.iter_mut()) {
        *ds = *p * (*ds - along_p) * scale;
    }
}
