//! `silu(gate) * up` on the GPU; the equations are those of the crate's `swiglu`.

use super::launch;
use super::values::{Element, Gpu, by_dtype, same_shape};
use candle_core::{Result, Tensor};

const NAME: &str = "swiglu";

/// `silu(gate) * up`, outside any graph.
///
/// # Shapes
/// `gate` and `up` of one shape -> the same shape; one dtype, f32 or bf16.
///
/// # Errors
/// When the shapes or dtypes differ, or a tensor is not on the same GPU.
pub fn swiglu_forward(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    same_shape(NAME, &[("gate", gate), ("up", up)])?;
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    by_dtype!(NAME, gate.dtype(), T => forward::<T>(&gate, &up))
}

fn forward<T: Element>(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let gpu = Gpu::of(NAME, gate)?;
    let len = gate.elem_count();
    let (g, u) = (gpu.read::<T>("gate", gate)?, gpu.read::<T>("up", up)?);
    let y = gpu.alloc::<T>(len)?;
    if len > 0 {
        let launch = gpu.elements(len)?;
        // SAFETY: all three have len values.
        unsafe { launch::swiglu_forward(&launch, y.out(), g.get::<T>(), u.get(), len as i64) }?;
    }
    Ok(y.into_tensor(gate.shape()))
}

/// Gradients of `gate` and `up` from that of the output, outside any graph.
///
/// # Shapes
/// `gate`, `up` and `dy` of one shape -> two of the same shape; one dtype, f32 or bf16.
///
/// # Errors
/// When the shapes or dtypes differ, or a tensor is not on the same GPU.
pub fn swiglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    same_shape(NAME, &[("gate", gate), ("up", up), ("the gradient", dy)])?;
    let (gate, up, dy) = (gate.contiguous()?, up.contiguous()?, dy.contiguous()?);
    by_dtype!(NAME, gate.dtype(), T => backward::<T>(&gate, &up, &dy))
}

fn backward<T: Element>(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(NAME, gate)?;
    let len = gate.elem_count();
    let (g, u) = (gpu.read::<T>("gate", gate)?, gpu.read::<T>("up", up)?);
    let dy = gpu.read::<T>("the gradient", dy)?;
    let (dg, du) = (gpu.alloc::<T>(len)?, gpu.alloc::<T>(len)?);
    if len > 0 {
        let launch = gpu.elements(len)?;
        // SAFETY: all five have len values.
        unsafe {
            launch::swiglu_backward(
                &launch,
                dg.out(),
                du.out(),
                g.get::<T>(),
                u.get(),
                dy.get(),
                len as i64,
            )
        }?;
    }
    Ok((dg.into_tensor(gate.shape()), du.into_tensor(gate.shape())))
}
