//! AdamW on the GPU, one launch for the weights of a bucket.

#![allow(unsafe_code)]

use super::adamw::{AdamWBuffers, AdamWConstants, AdamWSlot, NAME};
use crate::cpu::half_precision::by_half_precision;
use crate::cuda::adamw_slots::{AdamWSlots, RawSlot};
use crate::cuda::element::Element;
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::launch::Launch;
use candle_core::{DType, Result};
use half::bf16;

/// Blocks for one tensor of weights.
const MAX_BLOCKS: usize = 1056;

/// Buffers and slots are checked for lengths and for sharing a storage.
pub(crate) fn adamw(
    buffers: &AdamWBuffers<'_>,
    slots: &[AdamWSlot<'_>],
    constants: &AdamWConstants,
) -> Result<()> {
    let gpu = Gpu::of(NAME, buffers.exp_avg)?;
    let slots: Vec<AdamWSlot> = slots
        .iter()
        .filter(|slot| slot.len() > 0)
        .copied()
        .collect();
    for slots in slots.chunks(AdamWSlots::MAX) {
        match (buffers.master, slots.first()) {
            (Some(master), _) if master.dtype() == DType::I16 => {
                update::<bf16>(&gpu, buffers, slots, constants)
            }
            (Some(_), Some(first)) => by_half_precision!(NAME, "weights", first.weights, T => {
                update::<T>(&gpu, buffers, slots, constants)
            }),
            _ => update::<f32>(&gpu, buffers, slots, constants),
        }?;
    }
    Ok(())
}

/// Weights of one launch, of type `T`.
fn update<T: Element>(
    gpu: &Gpu,
    buffers: &AdamWBuffers<'_>,
    slots: &[AdamWSlot<'_>],
    constants: &AdamWConstants,
) -> Result<()> {
    let mut update = |raw| launch_update::<T>(gpu, buffers, slots, constants, raw);
    let raw = AdamWSlots::default();
    with_weights::<T>(gpu, slots, constants, (0, raw), &mut update)
}

/// Calls `then` with all weights under their write locks; those before `next` are set and locked.
fn with_weights<T: Element>(
    gpu: &Gpu,
    slots: &[AdamWSlot<'_>],
    constants: &AdamWConstants,
    (next, mut raw): (usize, AdamWSlots),
    then: &mut dyn FnMut(AdamWSlots) -> Result<()>,
) -> Result<()> {
    let Some(slot) = slots.get(next) else {
        return then(raw);
    };
    gpu.write::<T>("weights", slot.weights, |weights| {
        raw.slots[next] = RawSlot {
            weights: weights.address(),
            start: slot.start as i64,
            len: slot.len() as i64,
            decay_factor: slot.decay_factor(constants),
            unused: 0,
        };
        with_weights::<T>(gpu, slots, constants, (next + 1, raw), then)
    })
}

/// Rows of blocks, one for each slot.
fn grid(gpu: &Gpu, slots: &[AdamWSlot<'_>]) -> Result<Launch> {
    let longest = slots.iter().map(AdamWSlot::len).max().unwrap_or(0);
    let blocks = longest.div_ceil(2048).clamp(1, MAX_BLOCKS);
    gpu.grid([blocks, slots.len(), 1], BLOCK, 0)
}

fn launch_update<T: Element>(
    gpu: &Gpu,
    buffers: &AdamWBuffers<'_>,
    slots: &[AdamWSlot<'_>],
    constants: &AdamWConstants,
    raw: AdamWSlots,
) -> Result<()> {
    let c = *constants;
    let grad = gpu.read::<f32>("grad", buffers.grad)?;
    // Launches a kernel: they differ in the first argument.
    macro_rules! launch {
        ($kernel:expr, $masters:expr) => {
            gpu.write::<f32>("exp_avg", buffers.exp_avg, |m| {
                gpu.write::<f32>("exp_avg_sq", buffers.exp_avg_sq, |v| {
                    let (grid, grad) = (grid(gpu, slots)?, grad.get());
                    // SAFETY: every slot's values lie in the buffers, no two slots overlap, and no two buffers share a storage.
                    unsafe {
                        $kernel(
                            &grid,
                            $masters,
                            m,
                            v,
                            grad,
                            raw,
                            c.step_size,
                            c.correction,
                            c.one_minus_beta1,
                            c.beta2,
                            c.one_minus_beta2,
                            c.eps,
                            c.scale,
                        )
                    }
                })
            })
        };
    }
    match buffers.master {
        None => launch!(launch::adamw::<T>, None),
        Some(master) if master.dtype() == DType::I16 => {
            gpu.write::<i16>("master", master, |remainders| {
                launch!(launch::adamw_split, remainders)
            })
        }
        Some(master) => gpu.write::<f32>("master", master, |master| {
            launch!(launch::adamw::<T>, Some(master))
        }),
    }
}
