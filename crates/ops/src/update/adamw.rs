//! AdamW over the flat buffers of many weights, one pass, with weight decay apart from the gradient (Loshchilov and Hutter 2019,
//! arXiv:1711.05101): `m = m + (g - m)(1 - b1)`, `v = v b2 + g^2 (1 - b2)`,
//! `x = x decay_factor - step_size m / (sqrt(v) correction + eps)`. The same bits on every device.

use super::master_remainder::{join_master, split_master};
use crate::cpu::element::Element;
use crate::cpu::half_precision::by_half_precision;
use crate::cpu::vectorised::vectorised;
use crate::host::in_place::{storage_address, try_write, write};
use crate::host::on_cuda::on_cuda;
use crate::host::values::Host;
use candle_core::{DType, Result, Tensor, bail};
use half::bf16;
use rayon::prelude::*;
use std::collections::HashMap;

pub(crate) const NAME: &str = "adamw";

/// Values that a thread updates at a time: 32 KiB of all buffers.
const CHUNK: usize = 2 * 1024;

/// What a step multiplies by, computed in f64 and rounded, at step t of learning rate lr.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConstants {
    /// `lr / (1 - beta1^t)`.
    pub step_size: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    pub correction: f32,
    /// `1 - lr * weight_decay`, the factor of weights that decay.
    pub decay_factor: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// beta2.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Factor of the gradients.
    pub scale: f32,
}

/// Weights that have a place in the flat buffers.
#[derive(Clone, Copy, Debug)]
pub struct AdamWSlot<'a> {
    /// Contiguous, of any shape: f32, or bf16 or f16 if there are master values.
    pub weights: &'a Tensor,
    /// Place of the first weight in the flat buffers; the others follow.
    pub start: usize,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl AdamWSlot<'_> {
    /// Number of weights.
    pub(crate) fn len(&self) -> usize {
        self.weights.elem_count()
    }

    /// Factor of the weights.
    pub(crate) fn decay_factor(&self, constants: &AdamWConstants) -> f32 {
        match self.decays {
            true => constants.decay_factor,
            false => 1.0,
        }
    }
}

/// The flat buffers of a step, f32, contiguous and of as many values, on one device. No two tensors of a step may share a
/// storage.
#[derive(Clone, Copy, Debug)]
pub struct AdamWBuffers<'a> {
    /// The values that are trained, if the weights are bf16 or f16 and only get them rounded; of bf16 weights also their
    /// [remainders](crate::split_master) alone, as I16.
    pub master: Option<&'a Tensor>,
    /// First moments.
    pub exp_avg: &'a Tensor,
    /// Second moments.
    pub exp_avg_sq: &'a Tensor,
    /// Gradients.
    pub grad: &'a Tensor,
}

/// One step: changes the weights, and the master values and moments in their places of the flat buffers, where they are.
///
/// On a GPU this is one launch for 16 slots.
///
/// # Errors
/// When buffers differ in length, slots overlap or reach beyond them, or a tensor is on another device, has another dtype, is not
/// contiguous, or shares a storage with another.
pub fn adamw(
    buffers: &AdamWBuffers<'_>,
    slots: &[AdamWSlot<'_>],
    constants: &AdamWConstants,
) -> Result<()> {
    buffers.check(slots)?;
    on_cuda!(buffers.exp_avg => super::adamw_gpu::adamw(buffers, slots, constants));
    let _timer = crate::timing::op_timer::op(NAME);
    for slot in slots {
        let constants = AdamWConstants {
            decay_factor: slot.decay_factor(constants),
            ..*constants
        };
        step_of_slot(buffers, slot, &constants)?;
    }
    Ok(())
}

/// On a slot's part of the buffers.
fn step_of_slot(
    buffers: &AdamWBuffers<'_>,
    slot: &AdamWSlot<'_>,
    constants: &AdamWConstants,
) -> Result<()> {
    let len = slot.len();
    let part = |buffer: &Tensor| buffer.narrow(0, slot.start, len);
    let master = buffers.master.map(part).transpose()?;
    let (exp_avg, exp_avg_sq) = (part(buffers.exp_avg)?, part(buffers.exp_avg_sq)?);
    let grad = Host::<f32>::new(NAME, "grad", &part(buffers.grad)?)?;
    let grad = grad.read();
    try_write::<f32>(NAME, "exp_avg", &exp_avg, len, |m| {
        try_write::<f32>(NAME, "exp_avg_sq", &exp_avg_sq, len, |v| {
            let Some(master) = &master else {
                return write::<f32>(NAME, "weights", slot.weights, len, |weights| {
                    step::<bf16>([weights, m, v], None, &grad, constants);
                });
            };
            if master.dtype() == DType::I16 {
                return try_write::<i16>(NAME, "master", master, len, |remainders| {
                    write::<bf16>(NAME, "weights", slot.weights, len, |weights| {
                        step_split(weights, remainders, [m, v], &grad, constants);
                    })
                });
            }
            try_write::<f32>(NAME, "master", master, len, |master| {
                by_half_precision!(NAME, "weights", slot.weights, T =>
                    write::<T>(NAME, "weights", slot.weights, len, |weights| {
                        step([master, m, v], Some(weights), &grad, constants);
                    })
                )
            })
        })
    })
}

impl AdamWBuffers<'_> {
    fn check(&self, slots: &[AdamWSlot<'_>]) -> Result<()> {
        let len = self.exp_avg.elem_count();
        let buffers = [
            ("exp_avg", Some(self.exp_avg)),
            ("master", self.master),
            ("exp_avg_sq", Some(self.exp_avg_sq)),
            ("grad", Some(self.grad)),
        ];
        let mut tensors: Vec<(&str, &Tensor)> = Vec::new();
        for (what, buffer) in buffers {
            let Some(buffer) = buffer else { continue };
            if buffer.dims() != [len] {
                bail!(
                    "{NAME}: expected buffers of {len} values, as exp_avg has, got {what} of {:?}",
                    buffer.dims()
                )
            }
            tensors.push((what, buffer));
        }
        for slot in slots {
            let (start, num) = (slot.start, slot.len());
            if start.checked_add(num).is_none_or(|end| end > len) {
                bail!("{NAME}: {num} weights at {start} reach beyond the buffers of {len} values")
            }
            tensors.push(("weights", slot.weights));
        }
        let mut places: Vec<(usize, usize)> =
            slots.iter().map(|slot| (slot.start, slot.len())).collect();
        places.retain(|(_, len)| *len > 0);
        places.sort_unstable();
        for pair in places.windows(2) {
            if pair[0].0 + pair[0].1 > pair[1].0 {
                bail!(
                    "{NAME}: {} weights at {} and {} weights at {} overlap",
                    pair[0].1,
                    pair[0].0,
                    pair[1].1,
                    pair[1].0
                )
            }
        }
        // Each is locked while the others are: a second lock of one storage would never be granted.
        let mut seen = HashMap::with_capacity(tensors.len());
        for (what, tensor) in tensors {
            if let Some(other) = seen.insert(storage_address(tensor), what) {
                bail!("{NAME}: {other} and {what} share a storage, expected one for each")
            }
        }
        Ok(())
    }
}

fn step<T: Element>(
    [master, exp_avg, exp_avg_sq]: [&mut [f32]; 3],
    weights: Option<&mut [T]>,
    grad: &[f32],
    constants: &AdamWConstants,
) {
    let weights: Vec<Option<&mut [T]>> = match weights {
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
                || {
                    update([&mut *master, m, v], grad, constants);
                    if let Some(weights) = weights {
                        for (weight, master) in weights.iter_mut().zip(master) {
                            *weight = T::nearest(*master);
                        }
                    }
                },
            );
        });
}

/// As [`step`] with masters that are divided into weights and remainders.
fn step_split(
    weights: &mut [bf16],
    remainders: &mut [i16],
    [exp_avg, exp_avg_sq]: [&mut [f32]; 2],
    grad: &[f32],
    constants: &AdamWConstants,
) {
    weights
        .par_chunks_mut(CHUNK)
        .zip(remainders.par_chunks_mut(CHUNK))
        .zip(exp_avg.par_chunks_mut(CHUNK))
        .zip(exp_avg_sq.par_chunks_mut(CHUNK))
        .zip(grad.par_chunks(CHUNK))
        .for_each(|((((weights, remainders), m), v), grad)| {
            vectorised(
                #[inline(always)]
                || {
                    let mut masters = [0.0; CHUNK];
                    let masters = &mut masters[..grad.len()];
                    let parts = weights.iter().zip(remainders.iter());
                    for (master, (weight, remainder)) in masters.iter_mut().zip(parts) {
                        *master = join_master(*weight, *remainder);
                    }
                    update([&mut *masters, m, v], grad, constants);
                    let parts = weights.iter_mut().zip(remainders);
                    for (master, (weight, remainder)) in masters.iter().zip(parts) {
                        (*weight, *remainder) = split_master(*master);
                    }
                },
            );
        });
}

#[inline(always)]
fn update([x, m, v]: [&mut [f32]; 3], grad: &[f32], c: &AdamWConstants) {
    for (((x, m), v), g) in x.iter_mut().zip(m).zip(v).zip(grad) {
        let g = g * c.scale;
        *m += (g - *m) * c.one_minus_beta1;
        *v = *v * c.beta2 + g * g * c.one_minus_beta2;
        *x = *x * c.decay_factor - c.step_size * *m / (v.sqrt() * c.correction + c.eps);
    }
}
