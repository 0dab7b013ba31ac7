//! AdamW over flat buffers on the GPU, one launch for each (Loshchilov and Hutter 2019, arXiv:1711.05101).

use super::launch;
use super::pointer::OptIn;
use super::values::Gpu;
use candle_core::{Result, Tensor, bail};
use half::bf16;

const NAME: &str = "adamw";

/// What a step multiplies by, computed in f64 and rounded, at step t of learning rate lr.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConstants {
    /// `lr / (1 - beta1^t)`.
    pub step_size: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub correction: f32,
    /// `1 - lr * weight_decay`.
    pub shrink: f32,
    /// `1 - beta1`.
    pub rest1: f32,
    /// beta2.
    pub beta2: f32,
    /// `1 - beta2`.
    pub rest2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
}

/// The flat buffers of a step, contiguous and of as many values, f32 but for `weights`.
#[derive(Clone, Copy, Debug)]
pub struct AdamWBuffers<'a> {
    /// The values that are trained.
    pub master: &'a Tensor,
    /// First moments.
    pub exp_avg: &'a Tensor,
    /// Second moments.
    pub exp_avg_sq: &'a Tensor,
    /// bf16 weights that get the new values, rounded; without them the master values are the weights.
    pub weights: Option<&'a Tensor>,
    /// Gradients.
    pub grad: &'a Tensor,
}

/// One step: changes the master values, both moments and the weights. Gradients are multiplied by `scale`, and by the one
/// value of `device_scale` if there is one; nothing changes if that is NaN.
///
/// # Errors
/// When the buffers differ in length, have another dtype, or are not contiguous and on one GPU.
pub fn adamw(
    buffers: AdamWBuffers,
    constants: AdamWConstants,
    scale: f32,
    device_scale: Option<&Tensor>,
) -> Result<()> {
    let AdamWBuffers {
        master,
        exp_avg,
        exp_avg_sq,
        weights,
        grad,
    } = buffers;
    let gpu = Gpu::of(NAME, master)?;
    let len = master.elem_count();
    for buffer in [Some(exp_avg), Some(exp_avg_sq), weights, Some(grad)]
        .into_iter()
        .flatten()
    {
        if buffer.elem_count() != len {
            bail!(
                "{NAME}: expected buffers of {len} values, got one of {}",
                buffer.elem_count()
            )
        }
    }
    if device_scale.is_some_and(|scale| scale.elem_count() != 1) {
        bail!("{NAME}: expected one value as device_scale")
    }
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
    } = constants;
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
