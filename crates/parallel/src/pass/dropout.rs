//! Dropout whose mask is a function of what is trained on, and of no random state: the same bits on every layout, and when a forward
//! pass runs again.
//!
//! Whether feature f of position p of a sequence is dropped in a layer follows from the seed, the number of updates that were
//! made, what the sequence holds, the layer's name, p and f. A sequence is known by its tokens and targets up to its last target:
//! what pads it changes nothing.

use std::hash::Hasher;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::IGNORE_INDEX;
use rayon::prelude::*;
use twox_hash::XxHash64;

use super::pass::Pass;
use crate::placement::Indices;

/// The sequences of a micro-batch, each as a number.
#[derive(Debug)]
pub(super) struct SequenceKeys(Vec<u64>);

impl SequenceKeys {
    /// Of a training pass after `num_updates` updates.
    pub fn new(pass: &Pass, seed: u64, num_updates: usize) -> Result<Self> {
        let inputs = rows_of_numbers(pass.inputs())?;
        let targets = match pass.has_targets() {
            true => rows_of_numbers(pass.targets()?)?,
            false => inputs.clone(),
        };
        if inputs.len() != targets.len() {
            bail!(
                "a micro-batch has {} samples and targets of {}; dim 0 is that of the samples in both",
                inputs.len(),
                targets.len()
            );
        }
        let is_ids = pass.inputs().dims().len() == 2 && pass.inputs().dtype() == DType::U32;
        let key = |(inputs, targets): (&Vec<u32>, &Vec<u32>)| {
            let mut hash = XxHash64::with_seed(seed);
            hash.write_u64(num_updates as u64);
            if !is_ids || inputs.len() != targets.len() {
                inputs
                    .iter()
                    .chain(targets)
                    .for_each(|number| hash.write_u32(*number));
                return hash.finish();
            }
            let len = targets.iter().rposition(|&id| id != IGNORE_INDEX);
            let len = len.map_or(0, |last| last + 1);
            for (token, target) in inputs.iter().zip(targets).take(len) {
                hash.write_u32(*token);
                hash.write_u32(*target);
            }
            hash.finish()
        };
        Ok(Self(inputs.iter().zip(&targets).map(key).collect()))
    }
}

/// The values of each sample (dim 0), ids as they are and numbers by the bits of f32.
fn rows_of_numbers(values: &Tensor) -> Result<Vec<Vec<u32>>> {
    let values = match values.rank() {
        0 | 1 => values.flatten_all()?.unsqueeze(1)?,
        _ => values.flatten_from(1)?,
    };
    if values.dtype().is_int() {
        return values.to_dtype(DType::U32)?.to_vec2();
    }
    let rows = values.to_dtype(DType::F32)?.to_vec2::<f32>()?.into_iter();
    Ok(rows
        .map(|row| row.into_iter().map(f32::to_bits).collect())
        .collect())
}

/// The dropout of one layer's input.
#[derive(Clone, Debug)]
pub(crate) struct Dropout {
    probability: f64,
    /// The layer's name as a number.
    layer: u64,
    /// The features that this rank has; `None`: all of them.
    features: Option<Indices>,
}

impl Dropout {
    /// For the layer called `module`, of whose input features this rank has `features`; `None`: all.
    pub fn new(probability: f64, module: &str, features: Option<Indices>) -> Self {
        Self {
            probability,
            layer: XxHash64::oneshot(0, module.as_bytes()),
            features,
        }
    }

    /// Whether it drops anything in training.
    pub fn drops(&self) -> bool {
        self.probability > 0.0
    }

    /// What is to be multiplied with an input of shape `dims`, (.., features), in the type and on the device of `like`: 1 for what
    /// is kept, 0 for what is dropped; and what makes up for it, 1/(1-p). `None`: nothing is dropped in this pass.
    pub fn mask(
        &self,
        dims: &[usize],
        like: &Tensor,
        pass: &Pass,
    ) -> Result<Option<(Tensor, f64)>> {
        if !self.drops() {
            return Ok(None);
        }
        let Some(SequenceKeys(keys)) = pass.sequence_keys()? else {
            return Ok(None);
        };
        let num_features = dims.last().copied().unwrap_or(1);
        let num_values: usize = dims.iter().product();
        let num_rows = num_values / num_features.max(1);
        let cut = pass.of_cut();
        let is_whole = cut.is_none_or(|cut| cut.rows().len() == num_rows);
        if !is_whole || (cut.is_none() && !num_rows.is_multiple_of(keys.len().max(1))) {
            bail!(
                "the input of a layer with dropout has shape {dims:?}; expected as many rows for each of the {} sequences of the micro-batch",
                keys.len()
            );
        }
        let seq_len = match cut {
            None => num_rows / keys.len().max(1),
            Some(cut) => cut.whole().dims()?.1,
        };
        // At most 2³² - 1, as the probability is less than 1.
        let threshold = (self.probability * (1u64 << 32) as f64) as u32;
        let all = Indices::from(0..num_features);
        let features = self.features.as_ref().unwrap_or(&all).ranges();
        let mut mask = vec![0f32; num_values];
        let rows = mask.par_chunks_mut(num_features.max(1)).enumerate();
        rows.for_each(|(row, mask)| {
            let row = cut.map_or(row, |cut| cut.rows()[row] as usize);
            let (sequence, position) = (row / seq_len, row % seq_len);
            let key = mix(mix(keys[sequence] ^ self.layer).wrapping_add(position as u64));
            let mut mask = mask.iter_mut();
            for range in features {
                for (feature, value) in range.clone().zip(&mut mask) {
                    let bits = (mix(key.wrapping_add(feature as u64)) >> 32) as u32;
                    *value = f32::from(u8::from(bits >= threshold));
                }
            }
        });
        let mask = Tensor::from_vec(mask, dims, &Device::Cpu)?.to_dtype(like.dtype())?;
        let factor = 1.0 / (1.0 - self.probability);
        Ok(Some((mask.to_device(like.device())?, factor)))
    }
}

/// The output function of SplitMix64: every bit of the result depends on every bit of `value`.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
