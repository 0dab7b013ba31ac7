//! `silu(gate) * up` on the GPU; the equations are those of the crate's `swiglu`, which checks the shapes.

use super::element::{Element, by_dtype};
use super::gpu::Gpu;
use super::launch;
use crate::OpOutput;
use crate::host::detached;
use candle_core::{Result, Tensor};

const NAME: &str = "swiglu";

/// `silu(gate) * up`, in their shape and dtype.
pub(crate) fn swiglu_forward(gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    by_dtype!(NAME, "gate", gate, T => forward::<T>(&detached(gate)?, &detached(up)?))
}

fn forward<T: Element>(gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    let gpu = Gpu::of(NAME, gate)?;
    let len = gate.elem_count();
    let (g, u) = (gpu.read::<T>("gate", gate)?, gpu.read::<T>("up", up)?);
    let y = gpu.alloc::<T>(len)?;
    if len > 0 {
        let launch = gpu.elements(len)?;
        // SAFETY: all three have len values.
        unsafe { launch::swiglu_forward(&launch, y.out(), g.get::<T>(), u.get(), len as i64) }?;
    }
    Ok(y.into_output(gate.shape()))
}

/// Gradients of `gate` and `up` from that of the output, in their shape and dtype.
pub(crate) fn swiglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let (gate, up, dy) = (detached(gate)?, detached(up)?, detached(dy)?);
    by_dtype!(NAME, "gate", gate, T => backward::<T>(&gate, &up, &dy))
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
