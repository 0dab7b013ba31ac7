//! Attention by cuDNN where it can; none where our own kernels must do.

use super::graph::{
    DELTA, GRAD, K, K_GRAD, K_HEAD_GRADS, LOG_SUM_EXP, ONE, OUT, Q, Q_GRAD, Q_SUMS, SCALE, UNSEEN,
    V, V_GRAD, V_HEAD_GRADS, WINDOW, alignment,
};
use super::plan::Plan;
use super::plans::with_plans;
use super::sizes::{Direction, Sizes};
use super::work::{Argument, Work, refusal};
use crate::attention::ragged::Ragged;
use crate::attention::rectangle::Mask;
use crate::attention::spec::{AttentionGrad, AttentionSpec, NAME};
use crate::cpu::half_precision::by_half_precision;
use crate::cuda::cudnn_library::{Library, Opaque, is_out_of_memory};
use crate::cuda::element::Element;
use crate::cuda::gpu::Gpu;
use crate::cuda::profile::timed;
use crate::cuda::values::Fresh;
use crate::host::op_output::OpOutput;
use crate::settings::attention_code::AttentionCode;
use crate::settings::gpu_settings::GpuSettings;
use crate::timing::op_times::OpName;
use candle_core::{DType, Result, Tensor, bail};

/// As `attention_forward` of [`forward_gpu`](super::super::forward_gpu), of what the spec or `mask` says that queries see; the tensors are contiguous and outside any graph.
pub(in super::super) fn attention_forward(
    [q, k, v]: [&Tensor; 3],
    spec: &AttentionSpec,
    mask: Mask,
) -> Result<Option<(OpOutput, Tensor)>> {
    let Some(work) = supported([q, k], (spec, mask), Direction::Forward)? else {
        return Ok(None);
    };
    by_half_precision!(NAME, "q", q, T => forward::<T>(&work, [q, k, v]))
}

fn forward<T: Element>(work: &Work, [q, k, v]: [&Tensor; 3]) -> Result<Option<(OpOutput, Tensor)>> {
    let gpu = Gpu::of(NAME, q)?;
    let inputs = work.read::<T, _>(&gpu, [(Q, "q", q), (K, "k", k), (V, "v", v)])?;
    let o = gpu.alloc::<T>(q.elem_count())?;
    let log_sum_exp = gpu.alloc::<f32>(work.sizes.num_rows())?;
    let mut arguments: Vec<Argument> = inputs.iter().map(|(_, argument)| *argument).collect();
    arguments.push(work.of_values::<T>(OUT, o.out().address(), q));
    arguments.push(work.of_rows(LOG_SUM_EXP, log_sum_exp.out().address()));
    if !run(&gpu, work, &arguments)? {
        return not_by_cudnn("cuDNN has no kernel for these sizes; the log has its words");
    }
    let (b, t, heads, _d) = q.dims4()?;
    let log_sum_exp = match work.ragged {
        Some(_) => Ragged::by_token(&log_sum_exp.into_tensor((b, t, heads)))?,
        None => log_sum_exp.into_tensor((b, heads, t)),
    };
    Ok(Some((o.into_output(q.shape()), log_sum_exp)))
}

/// As `attention_backward` of [`backward_gpu`](super::super::backward_gpu); the tensors are contiguous and outside any graph.
pub(in super::super) fn attention_backward(
    pass: &AttentionGrad<'_>,
    spec: &AttentionSpec,
    mask: Mask,
) -> Result<Option<[Tensor; 3]>> {
    let kind = match GpuSettings::get()?.deterministic {
        true => Direction::DeterministicBackward,
        false => Direction::Backward,
    };
    let Some(work) = supported([pass.q, pass.k], (spec, mask), kind)? else {
        return Ok(None);
    };
    by_half_precision!(NAME, "q", pass.q, T => backward::<T>(&work, pass))
}

fn backward<T: Element>(work: &Work, pass: &AttentionGrad<'_>) -> Result<Option<[Tensor; 3]>> {
    let AttentionGrad { q, k, v, .. } = *pass;
    let gpu = Gpu::of(NAME, q)?;
    let tensors = [
        (Q, "q", q),
        (K, "k", k),
        (V, "v", v),
        (OUT, "the output", pass.output()?),
        (GRAD, "the gradient", pass.grad),
    ];
    let inputs = work.read::<T, _>(&gpu, tensors)?;
    let log_sum_exp = work.statistics(pass.log_sum_exp)?;
    let sums = gpu.read::<f32>("log_sum_exp", &log_sum_exp)?;
    let grads = [(Q_GRAD, q), (K_GRAD, k), (V_GRAD, v)];
    let [dq, dk, dv] = grads.map(|(_, like)| gpu.alloc::<T>(like.elem_count()));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let delta = gpu.alloc::<f32>(work.sizes.num_rows())?;
    let mut arguments: Vec<Argument> = inputs.iter().map(|(_, argument)| *argument).collect();
    arguments.push(work.of_rows(LOG_SUM_EXP, sums.get::<f32>().address()));
    arguments.push(work.of_rows(DELTA, delta.out().address()));
    for ((number, like), grad) in grads.into_iter().zip([&dq, &dk, &dv]) {
        arguments.push(work.of_values::<T>(number, grad.out().address(), like));
    }
    if !run(&gpu, work, &arguments)? {
        return not_by_cudnn("cuDNN has no kernel for these sizes; the log has its words");
    }
    Ok(Some([
        dq.into_tensor(q.shape()),
        dk.into_tensor(k.shape()),
        dv.into_tensor(v.shape()),
    ]))
}

/// What is to be done, if cuDNN may know how.
fn supported(
    [q, k]: [&Tensor; 2],
    (spec, mask): (&AttentionSpec, Mask),
    pass: Direction,
) -> Result<Option<Work>> {
    if q.elem_count() == 0 || k.elem_count() == 0 {
        return Ok(None);
    }
    let library = match refusal(q, k, spec)? {
        Some(reason) => Err(reason),
        None => Library::get().map_err(str::to_string),
    };
    let reason = match library {
        Ok(library) => return Work::new(library, [q, k], (spec, mask), pass).map(Some),
        Err(reason) => reason,
    };
    with_plans(|plans| plans.tell(reason.clone()));
    let is_narrow = matches!(q.dtype(), DType::BF16 | DType::F16);
    match is_narrow && GpuSettings::get()?.attention != Some(AttentionCode::Own) {
        true => not_by_cudnn(&reason),
        false => Ok(None),
    }
}

/// None, for our own kernels to do it, or an error where the user asked for cuDNN.
fn not_by_cudnn<R>(reason: &str) -> Result<Option<R>> {
    if GpuSettings::get()?.attention == Some(AttentionCode::Cudnn) {
        bail!("{NAME}: CANDLE_TRAIN_ATTENTION=cudnn, but {reason}")
    }
    Ok(None)
}

/// Puts the pass on the GPU's stream, some sequences at a time; false if cuDNN has no kernel for it. After a failure all of
/// it is done again by another one.
fn run(gpu: &Gpu, work: &Work, arguments: &[Argument]) -> Result<bool> {
    let Work { library, sizes, .. } = *work;
    let mut arguments = arguments.to_vec();
    let table = work.table(gpu)?;
    let table = table
        .as_ref()
        .map(|table| gpu.read::<u32>("the documents", table));
    let table = table.transpose()?;
    if let Some(table) = &table {
        arguments.extend(work.of_documents(table.get::<u32>().address()));
    }
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
        if let Some(wrong) = arguments
            .iter()
            .find(|argument| !argument.is_aligned(call.b, sizes.b))
        {
            let alignment = alignment(wrong.number);
            plans.tell(format!("a tensor is not aligned to {alignment} bytes"));
            return Ok(false);
        }
        loop {
            let Some(plan) = plans.plan(library, on, call)? else {
                return Ok(false);
            };
            let workspace = gpu.alloc::<f32>(plan.workspace_bytes.div_ceil(4))?;
            let scratch = scratch(gpu, call)?;
            let of_scratch = scratch
                .iter()
                .map(|(number, values)| Argument::shared(*number, values.out().address()));
            let arguments: Vec<Argument> = arguments.iter().copied().chain(of_scratch).collect();
            // SAFETY: the tensors have the sizes' shapes and are aligned; the plan was made with this handle, and the lock
            // is held. What frees the scratch memory is on the same stream, after the pass.
            let done = unsafe {
                let workspace = workspace.out().address();
                run_calls(gpu, work, (plan, handle), call, &arguments, workspace)
            };
            match done {
                Ok(()) => return Ok(true),
                Err(err) => plans.failed(ordinal, call, err)?,
            }
        }
    })
}

/// Memory of a pass beside its tensors and the workspace, the same for each of its calls, by number in the graph.
fn scratch(gpu: &Gpu, call: Sizes) -> Result<Vec<(i64, Fresh<f32>)>> {
    let head_grads = call.num_head_grads().div_ceil(2);
    let tensors = [
        (Q_SUMS, call.num_sums()),
        (K_HEAD_GRADS, head_grads),
        (V_HEAD_GRADS, head_grads),
    ];
    let tensors = tensors.into_iter().filter(|(_, len)| *len > 0);
    tensors
        .map(|(number, len)| Ok((number, gpu.alloc(len)?)))
        .collect()
}

/// One call after the other, over the sequences.
///
/// # Safety
/// As [`Plan::run`]; the arguments are those of all sequences.
unsafe fn run_calls(
    gpu: &Gpu,
    work: &Work,
    (plan, handle): (&Plan, Opaque),
    call: Sizes,
    arguments: &[Argument],
    workspace: u64,
) -> Result<()> {
    let sizes = work.sizes;
    let name = match sizes.pass {
        Direction::Forward => "attention_forward_cudnn",
        Direction::Backward => "attention_backward_cudnn",
        Direction::DeterministicBackward => "attention_backward_deterministic_cudnn",
    };
    let mut values = vec![(SCALE, work.scale), (ONE, 1.0), (UNSEEN, f32::NEG_INFINITY)];
    values.extend(sizes.window.map(|window| (WINDOW, window as f32)));
    for first in (0..sizes.b).step_by(call.b) {
        let at = |argument: &Argument| {
            let address = argument.address + (first * argument.bytes_each) as u64;
            (argument.number, address)
        };
        let tensors: Vec<(i64, u64)> = arguments.iter().map(at).collect();
        // SAFETY: the caller's promise; the sequences of a call divide all.
        timed(OpName::Named(name), &gpu.device.cuda_stream(), || unsafe {
            plan.run(handle, &tensors, workspace, &values)
        })?;
    }
    Ok(())
}
