//! Attention by cuDNN where it can; none where our own kernels must do.

use super::super::attention::NAME;
use super::super::element::Element;
use super::super::gpu::Gpu;
use super::super::profile::timed;
use super::super::values::{Fresh, Values};
use super::graph::{
    ALIGNMENT, DELTA, GRAD, K, K_GRAD, LOG_SUM_EXP, ONE, OUT, Q, Q_GRAD, Q_SUMS, SCALE, UNSEEN, V,
    V_GRAD, WINDOW,
};
use super::library::{Library, Opaque, is_out_of_memory};
use super::plan::Plan;
use super::plans::with_plans;
use super::sizes::{Pass, Sizes};
use crate::half_precision::by_half_precision;
use crate::op_times::OpName;
use crate::{AttentionCode, AttentionGrad, AttentionSpec, GpuSettings, OpOutput};
use candle_core::{DType, Result, Tensor, bail};

/// A tensor of a call: its number in the graph, the address of its first value, and the bytes of a sequence.
type Argument = (i64, u64, usize);

/// As `cuda::attention_forward`; the tensors are contiguous and outside any graph.
pub(in super::super) fn attention_forward(
    [q, k, v]: [&Tensor; 3],
    spec: &AttentionSpec,
) -> Result<Option<(OpOutput, Tensor)>> {
    let Some((library, sizes)) = supported(q, k, spec, Pass::Forward)? else {
        return Ok(None);
    };
    by_half_precision!(NAME, "q", q, T => forward::<T>(library, sizes, [q, k, v], spec.scale))
}

fn forward<T: Element>(
    library: &'static Library,
    sizes: Sizes,
    [q, k, v]: [&Tensor; 3],
    scale: f32,
) -> Result<Option<(OpOutput, Tensor)>> {
    let gpu = Gpu::of(NAME, q)?;
    let inputs = read::<T, _>(&gpu, [(Q, "q", q), (K, "k", k), (V, "v", v)], sizes.b)?;
    let o = gpu.alloc::<T>(q.elem_count())?;
    let log_sum_exp = gpu.alloc::<f32>(sizes.num_rows())?;
    let mut arguments: Vec<Argument> = inputs.iter().map(|(_, argument)| *argument).collect();
    arguments.push((OUT, o.out().address(), bytes_each(q, sizes.b)));
    arguments.push(of_rows(LOG_SUM_EXP, &log_sum_exp, sizes));
    if !run(&gpu, library, sizes, &arguments, scale)? {
        return not_by_cudnn("cuDNN has no kernel for these sizes; the log has its words");
    }
    let log_sum_exp = log_sum_exp.into_tensor((sizes.b, sizes.heads, sizes.t));
    Ok(Some((o.into_output(q.shape()), log_sum_exp)))
}

/// As `cuda::attention_backward`; the tensors are contiguous and outside any graph.
pub(in super::super) fn attention_backward(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
) -> Result<Option<(Tensor, Tensor, Tensor)>> {
    let kind = match GpuSettings::get()?.deterministic {
        true => Pass::DeterministicBackward,
        false => Pass::Backward,
    };
    let Some((library, sizes)) = supported(pass.q, pass.k, spec, kind)? else {
        return Ok(None);
    };
    by_half_precision!(NAME, "q", pass.q, T => backward::<T>(library, sizes, pass, spec.scale))
}

fn backward<T: Element>(
    library: &'static Library,
    sizes: Sizes,
    pass: &AttentionGrad<'_>,
    scale: f32,
) -> Result<Option<(Tensor, Tensor, Tensor)>> {
    let AttentionGrad {
        q,
        k,
        v,
        out,
        log_sum_exp,
        grad,
    } = *pass;
    let gpu = Gpu::of(NAME, q)?;
    let tensors = [
        (Q, "q", q),
        (K, "k", k),
        (V, "v", v),
        (OUT, "the output", out),
        (GRAD, "the gradient", grad),
    ];
    let inputs = read::<T, _>(&gpu, tensors, sizes.b)?;
    let sums = gpu.read::<f32>("log_sum_exp", log_sum_exp)?;
    let grads = [(Q_GRAD, q), (K_GRAD, k), (V_GRAD, v)];
    let [dq, dk, dv] = grads.map(|(_, like)| gpu.alloc::<T>(like.elem_count()));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let delta = gpu.alloc::<f32>(sizes.num_rows())?;
    let mut arguments: Vec<Argument> = inputs.iter().map(|(_, argument)| *argument).collect();
    let row_bytes = 4 * sizes.num_rows() / sizes.b;
    arguments.push((LOG_SUM_EXP, sums.get::<f32>().address(), row_bytes));
    arguments.push(of_rows(DELTA, &delta, sizes));
    for ((number, like), grad) in grads.into_iter().zip([&dq, &dk, &dv]) {
        arguments.push((number, grad.out().address(), bytes_each(like, sizes.b)));
    }
    if !run(&gpu, library, sizes, &arguments, scale)? {
        return not_by_cudnn("cuDNN has no kernel for these sizes; the log has its words");
    }
    Ok(Some((
        dq.into_tensor(q.shape()),
        dk.into_tensor(k.shape()),
        dv.into_tensor(v.shape()),
    )))
}

/// Shorter sequences are left to our kernels: each length takes a plan of its own, about half a second of work, and a text that is
/// generated passes through all lengths.
const MIN_TOKENS: usize = 128;

/// The library and the sizes, if cuDNN may know them.
fn supported(
    q: &Tensor,
    k: &Tensor,
    spec: &AttentionSpec,
    pass: Pass,
) -> Result<Option<(&'static Library, Sizes)>> {
    let (b, t, heads, d) = q.dims4()?;
    let (_, _, kv_heads, _) = k.dims4()?;
    let groups = spec.groups;
    if q.elem_count() == 0 || k.elem_count() == 0 {
        return Ok(None);
    }
    let asked_for = GpuSettings::get()?.attention;
    let is_narrow = matches!(q.dtype(), DType::BF16 | DType::F16);
    let refusal = if asked_for == Some(AttentionCode::Own) {
        Some("CANDLE_TRAIN_ATTENTION=own".to_string())
    } else if !is_narrow {
        Some(format!("it takes BF16 and F16, not {:?}", q.dtype()))
    } else if t < MIN_TOKENS && asked_for != Some(AttentionCode::Cudnn) {
        Some(format!("sequences are shorter than {MIN_TOKENS} tokens"))
    } else if !d.is_multiple_of(8) || d > 256 {
        Some(format!(
            "it takes heads of a multiple of 8 up to 256, not {d}"
        ))
    } else if spec.documents.is_some() {
        Some("it takes sequences of one document each".to_string())
    } else if groups.offset != 0 || heads != kv_heads * groups.size {
        Some(format!(
            "it takes whole groups of heads, not {heads} query heads on {kv_heads} key/value heads with {groups:?}"
        ))
    } else {
        None
    };
    let library = match refusal {
        Some(reason) => Err(reason),
        None => Library::get().map_err(str::to_string),
    };
    match library {
        Ok(library) => {
            let sizes = Sizes {
                pass,
                dtype: q.dtype(),
                b,
                t,
                heads,
                kv_heads,
                d,
                window: spec.window.filter(|window| *window < t),
            };
            Ok(Some((library, sizes)))
        }
        Err(reason) if is_narrow && asked_for != Some(AttentionCode::Own) => {
            with_plans(|plans| plans.tell(reason.clone()));
            not_by_cudnn(&reason)
        }
        Err(reason) => {
            with_plans(|plans| plans.tell(reason));
            Ok(None)
        }
    }
}

/// None, for our own kernels to do it, or an error where the user asked for cuDNN.
fn not_by_cudnn<R>(reason: &str) -> Result<Option<R>> {
    if GpuSettings::get()?.attention == Some(AttentionCode::Cudnn) {
        bail!("{NAME}: CANDLE_TRAIN_ATTENTION=cudnn, but {reason}")
    }
    Ok(None)
}

/// Bytes of a sequence of one of `b`, of 16 bits a value.
fn bytes_each(tensor: &Tensor, b: usize) -> usize {
    2 * tensor.elem_count() / b
}

fn of_rows(number: i64, values: &Fresh<f32>, sizes: Sizes) -> Argument {
    (
        number,
        values.out().address(),
        4 * sizes.num_rows() / sizes.b,
    )
}

/// The values of tensors, locked, and where they are.
fn read<'a, T: Element, const N: usize>(
    gpu: &Gpu,
    tensors: [(i64, &str, &'a Tensor); N],
    b: usize,
) -> Result<Vec<(Values<'a>, Argument)>> {
    let read = |(number, what, tensor): (i64, &str, &'a Tensor)| {
        let values = gpu.read::<T>(what, tensor)?;
        let address = values.get::<T>().address();
        Ok((values, (number, address, bytes_each(tensor, b))))
    };
    tensors.into_iter().map(read).collect()
}

/// Puts the pass on the GPU's stream, some sequences at a time; false if cuDNN has no kernel for it. After a failure all of
/// it is done again by another one.
fn run(
    gpu: &Gpu,
    library: &'static Library,
    sizes: Sizes,
    arguments: &[Argument],
    scale: f32,
) -> Result<bool> {
    let ordinal = gpu.device.cuda_stream().context().ordinal();
    with_plans(|plans| {
        let handle = match plans.handle(library, &gpu.device) {
            Ok(handle) => handle,
            Err(err) if is_out_of_memory(&err) => return Err(err),
            Err(err) => {
                plans.tell(err.to_string());
                return Ok(false);
            }
        };
        let on = (ordinal, handle);
        let Some(call) = plans.sizes_of_one_call(library, on, sizes)? else {
            return Ok(false);
        };
        let is_aligned = |(_, address, bytes): &Argument| {
            let bytes = (bytes * call.b) as u64;
            address.is_multiple_of(ALIGNMENT)
                && (sizes.b == call.b || bytes.is_multiple_of(ALIGNMENT))
        };
        if !arguments.iter().all(is_aligned) {
            plans.tell(format!("a tensor is not aligned to {ALIGNMENT} bytes"));
            return Ok(false);
        }
        loop {
            let Some(plan) = plans.plan(library, on, call)? else {
                return Ok(false);
            };
            let workspace = gpu.alloc::<f32>(plan.workspace_bytes.div_ceil(4))?;
            let sums = gpu.alloc::<f32>(call.num_sums())?;
            let mut arguments = arguments.to_vec();
            if call.num_sums() > 0 {
                arguments.push((Q_SUMS, sums.out().address(), 0));
            }
            // SAFETY: the tensors have the sizes' shapes and are aligned; the plan was made with this handle, and the lock
            // is held. What frees workspace and sums is on the same stream, after the pass.
            let done = unsafe {
                let workspace = workspace.out().address();
                run_calls(
                    gpu,
                    plan,
                    handle,
                    (sizes, call),
                    &arguments,
                    workspace,
                    scale,
                )
            };
            match done {
                Ok(()) => return Ok(true),
                Err(err) => plans.failed(ordinal, call, err)?,
            }
        }
    })
}

/// One call after the other, over the sequences.
///
/// # Safety
/// As [`Plan::run`]; the arguments are those of all sequences.
unsafe fn run_calls(
    gpu: &Gpu,
    plan: &Plan,
    handle: Opaque,
    (sizes, call): (Sizes, Sizes),
    arguments: &[Argument],
    workspace: u64,
    scale: f32,
) -> Result<()> {
    let name = match sizes.pass {
        Pass::Forward => "attention_forward_cudnn",
        Pass::Backward => "attention_backward_cudnn",
        Pass::DeterministicBackward => "attention_backward_deterministic_cudnn",
    };
    let mut values = vec![(SCALE, scale), (ONE, 1.0), (UNSEEN, f32::NEG_INFINITY)];
    values.extend(sizes.window.map(|window| (WINDOW, window as f32)));
    for first in (0..sizes.b).step_by(call.b) {
        let at = |(number, address, bytes): &Argument| (*number, address + (first * bytes) as u64);
        let tensors: Vec<(i64, u64)> = arguments.iter().map(at).collect();
        // SAFETY: the caller's promise; the sequences of a call divide all.
        timed(OpName::Named(name), &gpu.device.cuda_stream(), || unsafe {
            plan.run(handle, &tensors, workspace, &values)
        })?;
    }
    Ok(())
}
