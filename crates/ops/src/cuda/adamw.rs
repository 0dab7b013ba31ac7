//! AdamW on the GPU, one launch for each step of a buffer; the equations are those of the crate's `adamw`.

use super::gpu::Gpu;
use super::launch;
use super::pointer::OptIn;
use crate::adamw::{AdamWBuffers, AdamWConstants, NAME};
use candle_core::Result;
use half::bf16;

/// Buffers are checked for length and for sharing a storage.
pub(crate) fn adamw(buffers: &AdamWBuffers<'_>, constants: &AdamWConstants) -> Result<()> {
    let AdamWBuffers {
        master,
        exp_avg,
        exp_avg_sq,
        weights,
        grad,
        device_scale,
    } = *buffers;
    let gpu = Gpu::of(NAME, master)?;
    let len = master.elem_count();
    let grad = gpu.read::<f32>("grad", grad)?;
    let device_scale = device_scale.map(|scale| gpu.read::<f32>("device_scale", scale));
    let device_scale = device_scale.transpose()?;
    let device_scale: OptIn<f32> = device_scale.as_ref().map(|scale| scale.get());
    let AdamWConstants {
        step_size,
        correction,
        shrink,
        rest1,
        beta2,
        rest2,
        eps,
        scale,
    } = *constants;
    gpu.write::<f32>("master", master, |master| {
        gpu.write::<f32>("exp_avg", exp_avg, |m| {
            gpu.write::<f32>("exp_avg_sq", exp_avg_sq, |v| {
                let (launch, grad, count) = (gpu.elements(len)?, grad.get(), len as i64);
                let Some(weights) = weights else {
                    // SAFETY: all buffers have len values.
                    return unsafe {
                        launch::adamw_f32(
                            &launch,
                            master,
                            m,
                            v,
                            grad,
                            count,
                            step_size,
                            correction,
                            shrink,
                            rest1,
                            beta2,
                            rest2,
                            eps,
                            scale,
                            device_scale,
                        )
                    };
                };
                gpu.write::<bf16>("weights", weights, |weights| {
                    // SAFETY: all buffers have len values.
                    unsafe {
                        launch::adamw_bf16(
                            &launch,
                            master,
                            m,
                            v,
                            weights,
                            grad,
                            count,
                            step_size,
                            correction,
                            shrink,
                            rest1,
                            beta2,
                            rest2,
                            eps,
                            scale,
                            device_scale,
                        )
                    }
                })
            })
        })
    })
}
