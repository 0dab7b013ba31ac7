//! AdamW over flat buffers, one pass, with weight decay apart from the gradient (Loshchilov and Hutter 2019,
//! arXiv:1711.05101): `m = m + (g - m)(1 - b1)`, `v = v b2 + g^2 (1 - b2)`,
//! `x = x shrink - step_size m / (sqrt(v) correction + eps)`. The same bits on every device.

use crate::brain_float::round_into;
use crate::dispatch::on_cuda;
use crate::host::HostF32;
use crate::in_place::{same_storage, try_write};
use crate::vectorised::vectorised;
use candle_core::{Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;

pub(crate) const NAME: &str = "adamw";

/// Values that a thread updates at a time.
const CHUNK: usize = 16 * 1024;

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
    /// Factor of the gradients.
    pub scale: f32,
}

/// The flat buffers of a step, contiguous and of as many values, f32 but for `weights`, on one device. No two may share a
/// storage.
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
    /// One f32 value, another factor of the gradients, which the host need not know: what
    /// [`clip_scale`](crate::clip_scale) returned.
    pub device_scale: Option<&'a Tensor>,
}

/// One step: changes the master values, both moments and the weights where they are.
///
/// Nothing changes if the factor of the gradients is NaN, so the host may learn of a broken step after it.
///
/// # Errors
/// When the buffers differ in length or device, have another dtype, are not contiguous, or share a storage.
pub fn adamw(buffers: &AdamWBuffers<'_>, constants: &AdamWConstants) -> Result<()> {
    buffers.check()?;
    on_cuda!(buffers.master => crate::cuda::adamw(buffers, constants));
    let factor = match buffers.device_scale {
        Some(scale) => constants.scale * HostF32::new(NAME, "device_scale", scale)?.read()[0],
        None => constants.scale,
    };
    let grad = HostF32::new(NAME, "grad", buffers.grad)?;
    if factor.is_nan() {
        return Ok(());
    }
    let constants = AdamWConstants {
        scale: factor,
        ..*constants
    };
    let len = buffers.master.elem_count();
    let grad = grad.read();
    try_write::<f32>(NAME, "master", buffers.master, len, |master| {
        try_write::<f32>(NAME, "exp_avg", buffers.exp_avg, len, |m| {
            try_write::<f32>(NAME, "exp_avg_sq", buffers.exp_avg_sq, len, |v| {
                let Some(weights) = buffers.weights else {
                    step([master, m, v], None, &grad, &constants);
                    return Ok(());
                };
                try_write::<bf16>(NAME, "weights", weights, len, |weights| {
                    step([master, m, v], Some(weights), &grad, &constants);
                    Ok(())
                })
            })
        })
    })
}

impl AdamWBuffers<'_> {
    fn check(&self) -> Result<()> {
        let len = self.master.elem_count();
        let buffers: Vec<(&str, &Tensor)> = [
            ("master", Some(self.master)),
            ("exp_avg", Some(self.exp_avg)),
            ("exp_avg_sq", Some(self.exp_avg_sq)),
            ("weights", self.weights),
            ("grad", Some(self.grad)),
        ]
        .into_iter()
        .filter_map(|(what, buffer)| Some((what, buffer?)))
        .collect();
        for (i, (what, buffer)) in buffers.iter().enumerate() {
            if buffer.elem_count() != len {
                bail!(
                    "{NAME}: expected buffers of {len} values, as master has, got {what} of {}",
                    buffer.elem_count()
                )
            }
            // Each is locked while the others are: a second lock of one storage would never be granted.
            let shared = buffers[..i]
                .iter()
                .find(|(_, other)| same_storage(buffer, other));
            if let Some((other, _)) = shared {
                bail!("{NAME}: {other} and {what} share a storage, expected one for each")
            }
        }
        match self.device_scale {
            Some(scale) if scale.elem_count() != 1 => bail!(
                "{NAME}: expected one value as device_scale, got {:?}",
                scale.dims()
            ),
            _ => Ok(()),
        }
    }
}

fn step(
    [master, exp_avg, exp_avg_sq]: [&mut [f32]; 3],
    weights: Option<&mut [bf16]>,
    grad: &[f32],
    constants: &AdamWConstants,
) {
    let weights: Vec<Option<&mut [bf16]>> = match weights {
        Some(weights) => weights.chunks_mut(CHUNK).map(Some).collect(),
        None => grad.chunks(CHUNK).map(|_| None).collect(),
    };
    master
        .par_chunks_mut(CHUNK)
        .zip(exp_avg.par_chunks_mut(CHUNK))
        .zip(exp_avg_sq.par_chunks_mut(CHUNK))
        .zip(grad.par_chunks(CHUNK))
        .zip(weights)
        .for_each(|((((master, m), v), grad), weights)| {
            vectorised(
                #[inline(always)]
                || update([&mut *master, m, v], grad, constants),
            );
            if let Some(weights) = weights {
                round_into(weights, master);
            }
        });
}

#[inline(always)]
fn update([x, m, v]: [&mut [f32]; 3], grad: &[f32], c: &AdamWConstants) {
    for (((x, m), v), g) in x.iter_mut().zip(m).zip(v).zip(grad) {
        let g = g * c.scale;
        *m += (g - *m) * c.rest1;
        *v = *v * c.beta2 + g * g * c.rest2;
        *x = *x * c.shrink - c.step_size * *m / (v.sqrt() * c.correction + c.eps);
    }
}
