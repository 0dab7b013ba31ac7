//! Causal softmax attention with grouped heads: `o_i = sum over j <= i of softmax_j(scale q_i . k_j) v_j`, with a window of `w`
//! positions over `i - w < j <= i`, with documents over those of i's own.
//!
//! Never more than one block of rows of scores per thread: see [`crate::attention::blocks`].

use super::blocks::AttentionBlocks;
use super::spec::{AttentionGrad, AttentionSpec, NAME};
use crate::cpu::element::by_float;
use crate::host::floats::HostFloats;
use crate::host::in_place::{must_not_share, try_write};
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::values::Host;
use crate::host::with_backward::with_backward_of_result;
use crate::settings::attention_code::AttentionCode;
use crate::settings::product_choice::ProductChoice;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Attention of each position to itself and the positions before it, all of them or those in the window and the document that `spec` tells:
/// what lies outside is not computed but for the borders of blocks of 32 queries, so time is that of `t * window` scores, or of each
/// document's alone.
///
/// Local query head `h` reads local key/value head `(groups.offset + h) / groups.size`. Key/value heads that no query
/// head reads get a gradient of zeros. Relative error against f64 about 5e-7, forward and backward, for scores of some
/// units: see `docs/accuracy.md`.
///
/// # Shapes
/// `q (b, t, hq, d)`, `k (b, tk, hkv, d)`, `v (b, tk, hkv, d)` -> `(b, t, hq, d)`; one dtype; `tk` is `t` unless the spec's rows say otherwise. Memory beyond inputs, output and
/// gradients: `b * hq * t` numbers, one or two blocks of rows of
/// scores per thread, packed copies of k and v, and in the backward pass the gradients of k and v in f32, for few sequences and heads some
/// times.
///
/// # Errors
/// When the shapes, the groups or the rows do not fit, the window is 0, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn causal_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
) -> Result<Tensor> {
    let (out, log_sum_exp) = forward(q, k, v, spec, false)?;
    let [q_value, k_value, v_value] = [q, k, v].map(Tensor::detach);
    let (tracked, spec) = ([q, k, v].map(Tensor::track_op), spec.clone());
    with_backward_of_result([q, k, v], out, NAME, move |out, grad| {
        let pass = AttentionGrad {
            q: &q_value,
            k: &k_value,
            v: &v_value,
            out: Some(out),
            log_sum_exp: &log_sum_exp,
            grad,
        };
        let (dq, dk, dv) = attention_backward(&pass, &spec)?;
        let [q_tracked, k_tracked, v_tracked] = tracked;
        Ok([
            q_tracked.then_some(dq),
            k_tracked.then_some(dk),
            v_tracked.then_some(dv),
        ])
    })
}

/// [`causal_attention`] outside any graph: the output, and the log-sum-exp of each row of scaled scores.
///
/// # Shapes
/// `q (b, t, hq, d)`, `k (b, tk, hkv, d)`, `v (b, tk, hkv, d)` of one dtype -> `(b, t, hq, d)` in that
/// dtype, and `(b, hq, t)` in f32: zeros and minus infinity where a query sees no key.
///
/// # Errors
/// When the shapes, the groups or the rows do not fit, the window is 0, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor)> {
    let (out, log_sum_exp) = forward(q, k, v, spec, false)?;
    Ok((out.into_tensor(), log_sum_exp))
}

/// [`attention_forward`] for some of the keys that the queries see, which [`merge_attention`](crate::merge_attention) puts together with others: the output is f32
/// whatever the inputs are.
///
/// # Errors
/// As [`attention_forward`].
pub fn attention_of_part(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor)> {
    let (out, log_sum_exp) = forward(q, k, v, spec, true)?;
    Ok((out.into_tensor(), log_sum_exp))
}

/// Gradients of `q`, `k` and `v`, in their shapes and dtype; outside any graph.
///
/// # Errors
/// When the shapes, the groups or the rows do not fit, the window is 0, or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn attention_backward(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
) -> Result<(Tensor, Tensor, Tensor)> {
    let AttentionGrad { q, k, v, .. } = *pass;
    let blocks = blocks(q, k, v, spec)?;
    check_pass(pass, &blocks)?;
    on_cuda!(q => super::backward_gpu::attention_backward(pass, spec));
    let _timer = crate::timing::op_timer::op("attention_backward");
    AttentionCode::Cpu.note();
    ProductChoice::from_env()?;
    let values = on_host(pass)?;
    let log_sum_exp = Host::<f32>::new(NAME, "log_sum_exp", pass.log_sum_exp)?;
    let log_sum_exp = log_sum_exp.read();
    by_float!(values[0].dtype(), T => {
        let [q_in, k_in, v_in, grad] = values.each_ref().map(HostFloats::read_as::<T>);
        let [dq, dk, dv] = blocks.backward([&q_in[..], &k_in, &v_in], &log_sum_exp, &grad);
        let tensor = |values, like: &Tensor| OpOutput::of(values, like.shape()).into_tensor();
        Ok((tensor(dq, q), tensor(dk, k), tensor(dv, v)))
    })
}

/// Adds to `sums`, the gradients of `q`, `k` and `v` in f32, what `k` and `v` give. If these are some of the keys that the queries see, log-sum-exp and `delta`, from
/// [`attention_delta`], are of the output for all of them: with those of `k` and `v` alone the gradients of q and k would be wrong. `None`: they are all.
///
/// # Shapes
/// `delta (b, hq, t)` f32; `sums` in the shapes of q, k and v. [`AttentionGrad::out`] is the whole output, too: GPUs read it, without `delta` or where cuDNN does.
///
/// # Errors
/// As [`attention_backward`], and sums of other shapes or dtypes.
pub fn attention_backward_of_part(
    pass: &AttentionGrad<'_>,
    delta: Option<&Tensor>,
    spec: &AttentionSpec,
    sums: &[Tensor; 3],
) -> Result<()> {
    let AttentionGrad { q, k, v, .. } = *pass;
    let blocks = blocks(q, k, v, spec)?;
    check_pass(pass, &blocks)?;
    if let Some(delta) = delta
        && delta.dims() != pass.log_sum_exp.dims()
    {
        bail!(
            "{NAME}: expected delta {:?}, got {:?}",
            pass.log_sum_exp.dims(),
            delta.dims()
        )
    }
    for (sum, of) in sums.iter().zip([q, k, v]) {
        if sum.dims() != of.dims() || sum.dtype() != DType::F32 {
            bail!(
                "{NAME}: expected a sum of gradients {:?} in f32, got {:?} in {:?}",
                of.dims(),
                sum.dims(),
                sum.dtype()
            )
        }
    }
    must_not_share(NAME, &sums[0], &sums[1])?;
    must_not_share(NAME, &sums[0], &sums[2])?;
    must_not_share(NAME, &sums[1], &sums[2])?;
    on_cuda!(q => super::backward_gpu::attention_backward_of_part(pass, delta, spec, sums));
    let _timer = crate::timing::op_timer::op("attention_backward");
    AttentionCode::Cpu.note();
    ProductChoice::from_env()?;
    let values = on_host(pass)?;
    let log_sum_exp = Host::<f32>::new(NAME, "log_sum_exp", pass.log_sum_exp)?;
    let delta = delta.map(|delta| Host::<f32>::new(NAME, "delta", delta));
    let delta = delta.transpose()?;
    let (log_sum_exp, delta) = (log_sum_exp.read(), delta.as_ref().map(Host::read));
    let [dq, dk, dv] = sums;
    let what = "a sum of gradients";
    try_write(NAME, what, dq, q.elem_count(), |dq| {
        try_write(NAME, what, dk, k.elem_count(), |dk| {
            try_write(NAME, what, dv, v.elem_count(), |dv| {
                by_float!(values[0].dtype(), T => {
                    let [q, k, v, grad] = values.each_ref().map(HostFloats::read_as::<T>);
                    let numbers = (&log_sum_exp[..], delta.as_ref().map(|delta| &delta[..]));
                    blocks.add_backward([&q[..], &k, &v], numbers, &grad, [dq, dk, dv]);
                });
                Ok(())
            })
        })
    })
}

/// q, k, v and the gradient of the output on the host, of one dtype.
fn on_host(pass: &AttentionGrad<'_>) -> Result<[HostFloats; 4]> {
    let AttentionGrad { q, k, v, grad, .. } = *pass;
    HostFloats::of_one_dtype(NAME, [("q", q), ("k", k), ("v", v), ("the gradient", grad)])
}

/// An error unless what the backward pass reads has the shapes of the forward pass.
fn check_pass(pass: &AttentionGrad<'_>, blocks: &AttentionBlocks<'_>) -> Result<()> {
    let rows = [blocks.b, blocks.hq, blocks.t];
    let out = pass.out.map(|out| ("the output", out));
    let like_q = out.into_iter().chain([("the gradient", pass.grad)]);
    let expected = like_q.map(|(what, tensor)| (what, tensor, pass.q.dims()));
    let log_sum_exp = ("log_sum_exp", pass.log_sum_exp, &rows[..]);
    for (what, tensor, dims) in expected.chain([log_sum_exp]) {
        if tensor.dims() != dims {
            bail!("{NAME}: expected {what} {dims:?}, got {:?}", tensor.dims())
        }
    }
    Ok(())
}

/// The sum of the products of each query's output and its gradient: what [`attention_backward_of_part`] needs.
///
/// # Shapes
/// `out (b, t, hq, d)` f32, `grad` in its shape -> `(b, hq, t)` f32.
///
/// # Errors
/// Shapes or devices that differ.
pub fn attention_delta(out: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let products = (out.detach() * grad.detach().to_dtype(DType::F32)?)?;
    products.sum(3)?.transpose(1, 2)?.contiguous()
}

/// The output, which is f32 if it `is_part`, and the log-sum-exp.
fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
    is_part: bool,
) -> Result<(OpOutput, Tensor)> {
    let blocks = blocks(q, k, v, spec)?;
    on_cuda!(q => super::forward_gpu::attention_forward(q, k, v, spec, is_part));
    let _timer = crate::timing::op_timer::op("attention_forward");
    AttentionCode::Cpu.note();
    ProductChoice::from_env()?;
    let shape = q.shape();
    let values = HostFloats::of_one_dtype(NAME, [("q", q), ("k", k), ("v", v)])?;
    let (out, log_sum_exp) = by_float!(values[0].dtype(), T => {
        let [q, k, v] = values.each_ref().map(HostFloats::read_as::<T>);
        let values = [&q[..], &k[..], &v[..]];
        match is_part {
            true => {
                let (out, log_sum_exp) = blocks.forward::<T, f32>(values);
                (OpOutput::of(out, shape), log_sum_exp)
            }
            false => {
                let (out, log_sum_exp) = blocks.forward::<T, T>(values);
                (OpOutput::of(out, shape), log_sum_exp)
            }
        }
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
    let (b, t, kb, tk, hq, hkv, d) = match (q.dims(), k.dims(), v.dims()) {
        (&[b, t, hq, d], &[kb, tk, hkv, kd], v) if d == kd && v == k.dims() => {
            (b, t, kb, tk, hq, hkv, d)
        }
        (q, k, v) => bail!(
            "{NAME}: expected q (b, t, hq, d) and k, v (b, t, hkv, d), got q {q:?}, k {k:?}, v {v:?}"
        ),
    };
    if spec.rows.is_none() && (b, t) != (kb, tk) {
        bail!(
            "{NAME}: expected k and v of as many positions as q, got q {:?} and k {:?}, without rows that say which they are",
            q.dims(),
            k.dims()
        )
    }
    if b != kb && b != 1 {
        bail!(
            "{NAME}: q has {b} sequences and k {kb}; expected as many, or rows of all sequences in one"
        )
    }
    spec.validate((b, t), (kb, tk), hq, hkv)?;
    Ok(AttentionBlocks::new((b, t, tk), (hq, hkv, d), spec))
}
