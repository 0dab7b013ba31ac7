//! Causal softmax attention with grouped heads: `o_i = sum over j <= i of softmax_j(scale q_i . k_j) v_j`.
//!
//! Never more than one block of rows of scores per thread: see [`crate::attention_blocks`].

use crate::attention_blocks::AttentionBlocks;
use crate::host::HostF32;
use crate::host_floats::{HostFloats, one_dtype};
use crate::{HeadGroups, OpOutput, with_backward3};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "causal_attention";

/// Attention of each position to itself and the positions before it.
///
/// Local query head `h` reads local key/value head `(groups.offset + h) / groups.size`. Key/value heads that no query
/// head reads get a gradient of zeros. Relative error against f64 about 5e-7, forward and backward, for scores of some
/// units: see `docs/accuracy.md`.
///
/// # Shapes
/// `q (b, t, hq, d)`, `k (b, t, hkv, d)`, `v (b, t, hkv, d)` -> `(b, t, hq, d)`; one dtype. Memory beyond inputs, output and
/// gradients: `b * hq * t` numbers, one or two blocks of rows of
/// scores per thread, and for few sequences and heads some copies of the gradients of k and v.
///
/// # Errors
/// When the shapes or the groups do not fit, or a tensor is not f32 or bf16 on the CPU, or two differ in dtype.
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<Tensor> {
    let blocks = blocks(q, k, v, scale, groups)?;
    let (out, lse) = forward(&blocks, [q, k, v])?;
    let lse = Tensor::from_vec(lse, (blocks.b, blocks.hq, blocks.t), q.device())?;
    let [q_value, k_value, v_value] = [q, k, v].map(Tensor::detach);
    let tracked = [q, k, v].map(Tensor::track_op);
    with_backward3(q, k, v, out, NAME, move |grad| {
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
/// `q (b, t, hq, d)`, `k (b, t, hkv, d)`, `v (b, t, hkv, d)` of one dtype -> `(b, t, hq, d)` in that
/// dtype, and `(b, hq, t)` in f32.
///
/// # Errors
/// When the shapes or the groups do not fit, or a tensor is not f32 or bf16 on the CPU, or two differ in dtype.
pub fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor)> {
    let blocks = blocks(q, k, v, scale, groups)?;
    let (out, lse) = forward(&blocks, [q, k, v])?;
    Ok((
        out.into_tensor(),
        Tensor::from_vec(lse, (blocks.b, blocks.hq, blocks.t), q.device())?,
    ))
}

/// Gradients of `q`, `k` and `v` from that of the output and the log-sum-exp that [`attention_forward`] returned;
/// outside any graph.
///
/// # Shapes
/// `q` and `grad` `(b, t, hq, d)`, `k` and `v` `(b, t, hkv, d)`, of one dtype, and `lse (b, hq, t)` in f32
/// -> those of `q`, `k` and `v`.
///
/// # Errors
/// When the shapes or the groups do not fit, or a tensor is not f32 or bf16 on the CPU, or two differ in dtype.
pub fn attention_backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    lse: &Tensor,
    grad: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor, Tensor)> {
    let blocks = blocks(q, k, v, scale, groups)?;
    if grad.dims() != q.dims() || lse.dims() != [blocks.b, blocks.hq, blocks.t] {
        bail!(
            "{NAME}: expected a gradient of the shape of q {:?} and lse [{}, {}, {}], got {:?} and {:?}",
            q.dims(),
            blocks.b,
            blocks.hq,
            blocks.t,
            grad.dims(),
            lse.dims()
        )
    }
    let inputs = [("q", q), ("k", k), ("v", v), ("the gradient", grad)];
    let [q_host, k_host, v_host, grad] =
        inputs.map(|(what, tensor)| HostFloats::new(NAME, what, tensor));
    let (q_host, k_host, v_host, grad) = (q_host?, k_host?, v_host?, grad?);
    let inputs = [("q", &q_host), ("k", &k_host), ("v", &v_host)];
    let dtype = one_dtype(NAME, &inputs)?;
    one_dtype(NAME, &[("q", &q_host), ("the gradient", &grad)])?;
    let lse = HostF32::new(NAME, "lse", lse)?;
    let values = [&q_host.read()[..], &k_host.read()[..], &v_host.read()[..]];
    let [dq, dk, dv] = blocks.backward(values, &lse.read(), &grad.read());
    let tensor =
        |values, like: &Tensor| OpOutput::rounded(values, dtype, like.shape()).into_tensor();
    Ok((tensor(dq, q), tensor(dk, k), tensor(dv, v)))
}

/// The output, and the log-sum-exp in f32.
fn forward(blocks: &AttentionBlocks, [q, k, v]: [&Tensor; 3]) -> Result<(OpOutput, Vec<f32>)> {
    let shape = q.shape();
    let q = HostFloats::new(NAME, "q", q)?;
    let k = HostFloats::new(NAME, "k", k)?;
    let v = HostFloats::new(NAME, "v", v)?;
    let dtype = one_dtype(NAME, &[("q", &q), ("k", &k), ("v", &v)])?;
    let (out, lse) = blocks.forward([&q.read(), &k.read(), &v.read()]);
    Ok((OpOutput::rounded(out, dtype, shape), lse))
}

/// Sizes of inputs that fit.
fn blocks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<AttentionBlocks> {
    let (b, t, hq, hkv, d) = match (q.dims(), k.dims(), v.dims()) {
        (&[b, t, hq, d], &[kb, kt, hkv, kd], v) if [b, t, d] == [kb, kt, kd] && v == k.dims() => {
            (b, t, hq, hkv, d)
        }
        (q, k, v) => bail!(
            "{NAME}: expected q (b, t, hq, d) and k, v (b, t, hkv, d), got q {q:?}, k {k:?}, v {v:?}"
        ),
    };
    groups.validate(hq, hkv)?;
    Ok(AttentionBlocks {
        b,
        t,
        hq,
        hkv,
        d,
        scale,
        groups,
    })
}
