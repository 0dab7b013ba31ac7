//! Causal softmax attention with grouped heads: `o_i = sum over j <= i of softmax_j(scale q_i . k_j) v_j`, with a window of `w`
//! positions over `i - w < j <= i`, with documents over those of i's own.
//!
//! Never more than one block of rows of scores per thread: see [`crate::attention_blocks`].

use crate::attention_blocks::AttentionBlocks;
use crate::attention_spec::NAME;
use crate::dispatch::on_cuda;
use crate::element::by_float;
use crate::host::HostF32;
use crate::host_floats::{HostFloats, one_dtype};
use crate::with_backward::with_backward3_of_result;
use crate::{AttentionCode, AttentionGrad, AttentionSpec, OpOutput, ProductChoice};
use candle_core::{Device, Result, Tensor, bail};

/// Attention of each position to itself and the positions before it, all of them or those in the window and the document of `spec`:
/// what lies outside is not computed but for the borders of blocks of 32 queries, so time is that of `t * window` scores, or of each
/// document's alone.
///
/// Local query head `h` reads local key/value head `(groups.offset + h) / groups.size`. Key/value heads that no query
/// head reads get a gradient of zeros. Relative error against f64 about 5e-7, forward and backward, for scores of some
/// units: see `docs/accuracy.md`.
///
/// # Shapes
/// `q (b, t, hq, d)`, `k (b, t, hkv, d)`, `v (b, t, hkv, d)` -> `(b, t, hq, d)`; one dtype. Memory beyond inputs, output and
/// gradients: `b * hq * t` numbers, one or two blocks of rows of
/// scores per thread, packed copies of k and v, and in the backward pass the gradients of k and v in f32, for few sequences and heads some
/// times.
///
/// # Errors
/// When the shapes, the groups or the documents do not fit, the window is 0, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
) -> Result<Tensor> {
    let (out, log_sum_exp) = forward(q, k, v, spec)?;
    let [q_value, k_value, v_value] = [q, k, v].map(Tensor::detach);
    let (tracked, spec) = ([q, k, v].map(Tensor::track_op), spec.clone());
    with_backward3_of_result(q, k, v, out, NAME, move |out, grad| {
        let pass = AttentionGrad {
            q: &q_value,
            k: &k_value,
            v: &v_value,
            out,
            log_sum_exp: &log_sum_exp,
            grad,
        };
        let (dq, dk, dv) = attention_backward(&pass, &spec)?;
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
/// When the shapes, the groups or the documents do not fit, the window is 0, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor)> {
    let (out, log_sum_exp) = forward(q, k, v, spec)?;
    Ok((out.into_tensor(), log_sum_exp))
}

/// Gradients of `q`, `k` and `v`, in their shapes and dtype; outside any graph.
///
/// # Errors
/// When the shapes, the groups or the documents do not fit, the window is 0, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn attention_backward(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor, Tensor)> {
    let AttentionGrad {
        q,
        k,
        v,
        out,
        log_sum_exp,
        grad,
    } = *pass;
    let blocks = blocks(q, k, v, spec)?;
    let rows = [blocks.b, blocks.hq, blocks.t];
    for (what, tensor, dims) in [
        ("the output", out, q.dims()),
        ("the gradient", grad, q.dims()),
        ("log_sum_exp", log_sum_exp, &rows[..]),
    ] {
        if tensor.dims() != dims {
            bail!("{NAME}: expected {what} {dims:?}, got {:?}", tensor.dims())
        }
    }
    on_cuda!(q => crate::cuda::attention_backward(pass, spec));
    let _timer = crate::op_timer::op("attention_backward");
    AttentionCode::Cpu.note();
    ProductChoice::from_env()?;
    let [q_host, k_host, v_host, grad] = [("q", q), ("k", k), ("v", v), ("the gradient", grad)]
        .map(|(what, tensor)| HostFloats::new(NAME, what, tensor));
    let (q_host, k_host, v_host, grad) = (q_host?, k_host?, v_host?, grad?);
    let inputs = [
        ("q", &q_host),
        ("k", &k_host),
        ("v", &v_host),
        ("the gradient", &grad),
    ];
    let dtype = one_dtype(NAME, &inputs)?;
    let log_sum_exp = HostF32::new(NAME, "log_sum_exp", log_sum_exp)?;
    let log_sum_exp = log_sum_exp.read();
    by_float!(dtype, T => {
        let values = (q_host.read_as::<T>(), k_host.read_as::<T>(), v_host.read_as::<T>());
        let values = [&values.0[..], &values.1[..], &values.2[..]];
        let [dq, dk, dv] = blocks.backward(values, &log_sum_exp, &grad.read_as::<T>());
        let tensor = |values, like: &Tensor| OpOutput::of(values, like.shape()).into_tensor();
        Ok((tensor(dq, q), tensor(dk, k), tensor(dv, v)))
    })
}

/// The output, and the log-sum-exp.
fn forward(q: &Tensor, k: &Tensor, v: &Tensor, spec: &AttentionSpec) -> Result<(OpOutput, Tensor)> {
    let blocks = blocks(q, k, v, spec)?;
    on_cuda!(q => crate::cuda::attention_forward(q, k, v, spec));
    let _timer = crate::op_timer::op("attention_forward");
    AttentionCode::Cpu.note();
    ProductChoice::from_env()?;
    let shape = q.shape();
    let q = HostFloats::new(NAME, "q", q)?;
    let k = HostFloats::new(NAME, "k", k)?;
    let v = HostFloats::new(NAME, "v", v)?;
    let dtype = one_dtype(NAME, &[("q", &q), ("k", &k), ("v", &v)])?;
    let (out, log_sum_exp) = by_float!(dtype, T => {
        let (q, k, v) = (q.read_as::<T>(), k.read_as::<T>(), v.read_as::<T>());
        let (out, log_sum_exp) = blocks.forward([&q[..], &k[..], &v[..]]);
        (OpOutput::of(out, shape), log_sum_exp)
    });
    let log_sum_exp = Tensor::from_vec(log_sum_exp, (blocks.b, blocks.hq, blocks.t), &Device::Cpu)?;
    Ok((out, log_sum_exp))
}

/// Sizes of inputs that fit.
fn blocks<'a>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &'a AttentionSpec,
) -> Result<AttentionBlocks<'a>> {
    let (b, t, hq, hkv, d) = match (q.dims(), k.dims(), v.dims()) {
        (&[b, t, hq, d], &[kb, kt, hkv, kd], v) if [b, t, d] == [kb, kt, kd] && v == k.dims() => {
            (b, t, hq, hkv, d)
        }
        (q, k, v) => bail!(
            "{NAME}: expected q (b, t, hq, d) and k, v (b, t, hkv, d), got q {q:?}, k {k:?}, v {v:?}"
        ),
    };
    spec.validate((b, t), hq, hkv)?;
    Ok(AttentionBlocks {
        b,
        t,
        hq,
        hkv,
        d,
        spec,
    })
}
