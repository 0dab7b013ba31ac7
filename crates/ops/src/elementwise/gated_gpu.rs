//! `silu(gate) * up` and `gelu(gate) * up` on the GPU.

#![allow(unsafe_code)]

use super::gated::{CUBIC, Gated, SCALE};
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::Gpu;
use crate::cuda::launch;
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use candle_core::{DType, Result, Tensor};

const NAME: &str = "swiglu";

/// `act(gate) * up`, in their shape and dtype.
pub(crate) fn gated_forward(gated: Gated, gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
    let (gate, up) = (detached(gate)?, detached(up)?);
    match gated {
        Gated::Swiglu => by_dtype!(NAME, "gate", gate, T => swiglu::<T>(&gate, &up)),
        Gated::Geglu => Ok(geglu(&gate, &up)?.into()),
    }
}

/// Gradients of `gate` and `up` from that of the output, in their shape and dtype.
pub(crate) fn gated_backward(
    gated: Gated,
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (gate, up, dy) = (detached(gate)?, detached(up)?, detached(dy)?);
    match gated {
        Gated::Swiglu => by_dtype!(NAME, "gate", gate, T => swiglu_backward::<T>(&gate, &up, &dy)),
        Gated::Geglu => geglu_backward(&gate, &up, &dy),
    }
}

fn swiglu<T: Element>(gate: &Tensor, up: &Tensor) -> Result<OpOutput> {
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

fn swiglu_backward<T: Element>(
    gate: &Tensor,
    up: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor)> {
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

/// Made of candle's operations in f32, rounded once.
fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (x, dtype) = (gate.to_dtype(DType::F32)?, gate.dtype());
    let y = (&x * tanh(&x)?.affine(0.5, 0.5)?)?;
    (y * up.to_dtype(DType::F32)?)?.to_dtype(dtype)
}

fn geglu_backward(gate: &Tensor, up: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let (x, dtype) = (gate.to_dtype(DType::F32)?, gate.dtype());
    let (up, dy) = (up.to_dtype(DType::F32)?, dy.to_dtype(DType::F32)?);
    let tanh = tanh(&x)?;
    // With u the argument of tanh: (x (1 + tanh u) / 2)' = (1 + tanh u) / 2 + x (1 - tanh^2 u) / 2 u'
    let half = tanh.affine(0.5, 0.5)?;
    let du = x.sqr()?.affine(3.0 * SCALE * CUBIC, SCALE)?;
    let slope = (&half + ((&x * tanh.sqr()?.affine(-0.5, 0.5)?)? * du)?)?;
    let dgate = ((&dy * up)? * slope)?.to_dtype(dtype)?;
    Ok((dgate, (dy * (x * half)?)?.to_dtype(dtype)?))
}

/// `tanh(sqrt(2 / pi) (x + 0.044715 x^3))`.
fn tanh(x: &Tensor) -> Result<Tensor> {
    (x * x.sqr()?.affine(SCALE * CUBIC, SCALE)?)?.tanh()
}
