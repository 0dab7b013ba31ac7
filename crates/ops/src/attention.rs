//! Causal softmax attention with grouped heads: `o_i = sum over j <= i of softmax_j(scale q_i . k_j) v_j`.
//!
//! Computed by blocks of rows as in FlashAttention (Dao et al. 2022, arXiv:2205.14135): a thread holds the scores of
//! one block only, the backward recomputes them from the log-sum-exp of each row, and key/value heads are read where
//! they are by each query head of their group. With `p` the probabilities and `g = do v^T`:
//! `dv = p^T do`, `ds = p (g - sum_j p_j g_j)`, `dq = scale ds k`, `dk = scale ds^T q`.

#![allow(unsafe_code)]

use crate::HeadGroups;
use crate::chunks::{for_each_chunk, for_each_index};
use crate::exp::exp;
use crate::host::HostF32;
use crate::lanes;
use crate::matrix::{Matrix, MatrixMut, SharedBuffer};
use crate::with_backward3;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "causal_attention";
/// Query rows worked on at a time.
const BLOCK_ROWS: usize = 64;

/// Sizes of one call.
#[derive(Clone, Copy)]
struct Dims {
    b: usize,
    t: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    scale: f32,
    groups: HeadGroups,
}

/// Attention of each position to itself and the positions before it.
///
/// Local query head `h` reads local key/value head `(groups.offset + h) / groups.size`. Key/value heads that no query
/// head reads get a gradient of zeros.
///
/// # Shapes
/// `q (b, t, hq, d)`, `k (b, t, hkv, d)`, `v (b, t, hkv, d)` -> `(b, t, hq, d)`; f32. Memory beyond inputs, output and
/// gradients: `b * hq * t` numbers, and 64 to 192 rows of scores per thread.
///
/// # Errors
/// When the shapes or the groups do not fit, or a tensor is not f32 on the CPU.
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<Tensor> {
    let dims = Dims::new(q, k, v, scale, groups)?;
    let (out, lse) = dims.forward_tensors([q, k, v])?;
    let lse = Tensor::from_vec(lse, (dims.b, dims.hq, dims.t), q.device())?;
    let [q_value, k_value, v_value] = [q, k, v].map(Tensor::detach);
    let tracked = [q, k, v].map(Tensor::track_op);
    with_backward3(q, k, v, (out, q.shape()), NAME, move |grad| {
        let (dq, dk, dv) =
            attention_backward(&q_value, &k_value, &v_value, &lse, grad, scale, groups)?;
        Ok((
            tracked[0].then_some(dq),
            tracked[1].then_some(dk),
            tracked[2].then_some(dv),
        ))
    })
}

/// [`causal_attention`] outside any graph: the output, and the log-sum-exp of each row of scaled scores.
///
/// # Shapes
/// `q (b, t, hq, d)`, `k (b, t, hkv, d)`, `v (b, t, hkv, d)` -> `(b, t, hq, d)` and `(b, hq, t)`; f32.
///
/// # Errors
/// When the shapes or the groups do not fit, or a tensor is not f32 on the CPU.
pub fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor)> {
    let dims = Dims::new(q, k, v, scale, groups)?;
    let (out, lse) = dims.forward_tensors([q, k, v])?;
    Ok((
        Tensor::from_vec(out, q.shape(), q.device())?,
        Tensor::from_vec(lse, (dims.b, dims.hq, dims.t), q.device())?,
    ))
}

/// Gradients of `q`, `k` and `v` from that of the output and the log-sum-exp that [`attention_forward`] returned;
/// outside any graph.
///
/// # Shapes
/// `q` and `grad` `(b, t, hq, d)`, `k` and `v` `(b, t, hkv, d)`, `lse (b, hq, t)` -> those of `q`, `k` and `v`; f32.
///
/// # Errors
/// When the shapes or the groups do not fit, or a tensor is not f32 on the CPU.
pub fn attention_backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    lse: &Tensor,
    grad: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor, Tensor)> {
    let dims = Dims::new(q, k, v, scale, groups)?;
    if grad.dims() != q.dims() || lse.dims() != [dims.b, dims.hq, dims.t] {
        bail!(
            "{NAME}: expected a gradient of the shape of q {:?} and lse [{}, {}, {}], got {:?} and {:?}",
            q.dims(),
            dims.b,
            dims.hq,
            dims.t,
            grad.dims(),
            lse.dims()
        )
    }
    let inputs = [("q", q), ("k", k), ("v", v), ("the gradient", grad)];
    let [q_host, k_host, v_host, grad] =
        inputs.map(|(what, tensor)| HostF32::new(NAME, what, tensor));
    let (q_host, k_host, v_host, grad) = (q_host?, k_host?, v_host?, grad?);
    let lse = HostF32::new(NAME, "lse", lse)?;
    let values = [&q_host.read()[..], &k_host.read()[..], &v_host.read()[..]];
    let [dq, dk, dv] = dims.backward(values, &lse.read(), &grad.read());
    Ok((
        Tensor::from_vec(dq, q.shape(), q.device())?,
        Tensor::from_vec(dk, k.shape(), k.device())?,
        Tensor::from_vec(dv, v.shape(), v.device())?,
    ))
}

impl Dims {
    fn new(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, groups: HeadGroups) -> Result<Self> {
        let (b, t, hq, hkv, d) = match (q.dims(), k.dims(), v.dims()) {
            (&[b, t, hq, d], &[kb, kt, hkv, kd], v)
                if [b, t, d] == [kb, kt, kd] && v == k.dims() =>
            {
                (b, t, hq, hkv, d)
            }
            (q, k, v) => bail!(
                "{NAME}: expected q (b, t, hq, d) and k, v (b, t, hkv, d), got q {q:?}, k {k:?}, v {v:?}"
            ),
        };
        groups.validate(hq, hkv)?;
        Ok(Self {
            b,
            t,
            hq,
            hkv,
            d,
            scale,
            groups,
        })
    }

    /// Where head `head` of `heads` starts at position `t` of sequence `b`.
    fn start(&self, b: usize, t: usize, head: usize, heads: usize) -> usize {
        ((b * self.t + t) * heads + head) * self.d
    }

    /// `rows` positions of one head from position `t` on.
    fn head<'a>(
        &self,
        values: &'a [f32],
        (b, t, rows): (usize, usize, usize),
        (head, heads): (usize, usize),
    ) -> Matrix<'a> {
        Matrix::new(
            &values[self.start(b, t, head, heads)..],
            rows,
            self.d,
            heads * self.d,
        )
    }

    /// Scores computed in one pass over all heads.
    fn num_scores(&self) -> usize {
        self.b * self.hq * self.t * self.t
    }

    fn forward_tensors(&self, [q, k, v]: [&Tensor; 3]) -> Result<(Vec<f32>, Vec<f32>)> {
        let q = HostF32::new(NAME, "q", q)?;
        let k = HostF32::new(NAME, "k", k)?;
        let v = HostF32::new(NAME, "v", v)?;
        Ok(self.forward(&q.read(), &k.read(), &v.read()))
    }

    /// The output and the log-sum-exp `(b, hq, t)` of the scaled scores.
    fn forward(&self, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let mut out = vec![0f32; q.len()];
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
                self.forward_block([q, k, v], (b, head, first), out, lse);
            });
        });
        (out, lse)
    }

    /// The rows of `out` and `lse` from position `first` on, for one query head.
    fn forward_block(
        &self,
        [q, k, v]: [&[f32]; 3],
        (b, head, first): (usize, usize, usize),
        out: MatrixMut<'_>,
        lse: &mut [f32],
    ) {
        let kv = (self.groups.kv_head(head), self.hkv);
        let rows = lse.len();
        let seen = first + rows;
        let mut scores = vec![0f32; rows * seen];
        MatrixMut::new(&mut scores, rows, seen, seen).set_product(
            self.head(q, (b, first, rows), (head, self.hq)),
            self.head(k, (b, 0, seen), kv).t(),
        );
        for (row, lse) in lse.iter_mut().enumerate() {
            let (past, future) = scores[row * seen..][..seen].split_at_mut(first + row + 1);
            *lse = softmax(past, self.scale);
            future.fill(0.0);
        }
        let p = Matrix::new(&scores, rows, seen, seen);
        out.set_product(p, self.head(v, (b, 0, seen), kv));
    }

    /// The gradients of q, k and v. Each (sequence, key/value head) is one task, which adds the contributions of its
    /// query heads and their blocks in order: the same bits for any number of threads.
    fn backward(&self, [q, k, v]: [&[f32]; 3], lse: &[f32], grad: &[f32]) -> [Vec<f32>; 3] {
        let mut dq = vec![0f32; q.len()];
        let (mut dk, mut dv) = (vec![0f32; k.len()], vec![0f32; k.len()]);
        let [dq_all, dk_all, dv_all] = [&mut dq, &mut dk, &mut dv].map(|x| SharedBuffer::new(x));
        for_each_index(self.b * self.hkv, self.num_scores(), |i| {
            let (b, kv_head) = (i / self.hkv, i % self.hkv);
            let (q_step, kv_step) = (self.hq * self.d, self.hkv * self.d);
            let mut scratch = (Vec::new(), Vec::new());
            for head in self.groups.q_heads(kv_head, self.hq) {
                for first in (0..self.t).step_by(BLOCK_ROWS) {
                    let rows = BLOCK_ROWS.min(self.t - first);
                    let q_start = self.start(b, first, head, self.hq);
                    let kv_start = self.start(b, 0, kv_head, self.hkv);
                    // SAFETY: one task owns a (b, kv_head) and with it the query heads of its group; it makes these
                    // three matrices, which lie in different buffers, anew for each block.
                    let grads = unsafe {
                        [
                            dq_all.matrix(q_start, rows, self.d, q_step),
                            dk_all.matrix(kv_start, first + rows, self.d, kv_step),
                            dv_all.matrix(kv_start, first + rows, self.d, kv_step),
                        ]
                    };
                    let lse = &lse[(b * self.hq + head) * self.t + first..][..rows];
                    let at = (b, head, first);
                    self.backward_block([q, k, v, grad], at, lse, grads, &mut scratch);
                }
            }
        });
        [dq, dk, dv]
    }

    /// What one block of rows of one query head contributes to the gradients.
    fn backward_block(
        &self,
        [q, k, v, grad]: [&[f32]; 4],
        (b, head, first): (usize, usize, usize),
        lse: &[f32],
        [dq, dk, dv]: [MatrixMut<'_>; 3],
        (p, ds): &mut (Vec<f32>, Vec<f32>),
    ) {
        let rows = lse.len();
        let seen = first + rows;
        let kv = (self.groups.kv_head(head), self.hkv);
        let q = self.head(q, (b, first, rows), (head, self.hq));
        let grad = self.head(grad, (b, first, rows), (head, self.hq));
        let (k, v) = (
            self.head(k, (b, 0, seen), kv),
            self.head(v, (b, 0, seen), kv),
        );
        p.resize(rows * seen, 0.0);
        ds.resize(rows * seen, 0.0);
        MatrixMut::new(p, rows, seen, seen).set_product(q, k.t());
        MatrixMut::new(ds, rows, seen, seen).set_product(grad, v.t());
        for (row, lse) in lse.iter().enumerate() {
            let (p, p_future) = p[row * seen..][..seen].split_at_mut(first + row + 1);
            let (ds, ds_future) = ds[row * seen..][..seen].split_at_mut(first + row + 1);
            softmax_backward(p, ds, *lse, self.scale);
            p_future.fill(0.0);
            ds_future.fill(0.0);
        }
        let (p, ds) = (
            Matrix::new(p, rows, seen, seen),
            Matrix::new(ds, rows, seen, seen),
        );
        dv.add_product(p.t(), grad);
        dq.set_product(ds, k);
        dk.add_product(ds.t(), q);
    }
}

/// Turns scores into probabilities in place; returns `ln(sum exp(scale * score))`.
fn softmax(scores: &mut [f32], scale: f32) -> f32 {
    for score in scores.iter_mut() {
        *score *= scale;
    }
    let max = lanes::max(scores);
    for score in scores.iter_mut() {
        *score = exp(*score - max);
    }
    let sum = lanes::sum(scores, |x| x);
    let inverse = 1.0 / sum;
    for score in scores.iter_mut() {
        *score *= inverse;
    }
    max + sum.ln()
}

/// Turns raw scores into probabilities and the gradient of the probabilities into that of the raw scores, in place.
fn softmax_backward(p: &mut [f32], ds: &mut [f32], lse: f32, scale: f32) {
    for p in p.iter_mut() {
        *p = exp(*p * scale - lse);
    }
    let along_p = lanes::dot(p, ds);
    for (p, ds) in p.iter().zip(ds.iter_mut()) {
        *ds = *p * (*ds - along_p) * scale;
    }
}
