//! Dropout whose mask is a function of what is trained on, and of no random state: the same bits on every layout, and when a forward
//! pass runs again.
//!
//! Whether feature f of position p of a sequence is dropped in a layer follows from the seed, the number of updates that were
//! made, what the sequence holds, the layer's name, p and f. A sequence is known by its tokens and targets up to its last target:
//! what pads it changes nothing.

use std::hash::Hasher;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor, bail};
use candle_ops::IGNORE_INDEX;
use rayon::prelude::*;
use twox_hash::XxHash64;

use crate::params::Shard;
use crate::pipeline::MicroBatch;

/// The sequences of a micro-batch, each as a number.
#[derive(Debug)]
pub(crate) struct SequenceKeys {
    keys: Vec<u64>,
    seq_len: usize,
}

impl SequenceKeys {
    /// Of a training pass after `num_updates` updates.
    pub fn new(batch: &MicroBatch, seed: u64, num_updates: usize) -> Result<Self> {
        let (_b, seq_len) = batch.dims()?;
        let tokens = batch.tokens.to_vec2::<u32>()?;
        let targets = match &batch.targets {
            Some(targets) => targets.to_vec2::<u32>()?,
            None => tokens.clone(),
        };
        let key = |(tokens, targets): (&Vec<u32>, &Vec<u32>)| {
            let mut hash = XxHash64::with_seed(seed);
            hash.write_u64(num_updates as u64);
            let len = targets.iter().rposition(|&id| id != IGNORE_INDEX);
            let len = len.map_or(0, |last| last + 1);
            for (token, target) in tokens.iter().zip(targets).take(len) {
                hash.write_u32(*token);
                hash.write_u32(*target);
            }
            hash.finish()
        };
        Ok(Self {
            keys: tokens.iter().zip(&targets).map(key).collect(),
            seq_len,
        })
    }
}

/// The pass under way, which a stage tells to the layers that it runs. Outside of training passes there is none, and nothing is
/// dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct DropoutPass(Arc<Mutex<Option<Arc<SequenceKeys>>>>);

impl DropoutPass {
    /// Tells it to all layers that have a clone of this.
    pub fn set(&self, keys: Option<Arc<SequenceKeys>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    fn get(&self) -> Option<Arc<SequenceKeys>> {
        let keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        keys.clone()
    }
}

/// The dropout of one layer's input.
#[derive(Clone, Debug)]
pub(super) struct Dropout {
    probability: f64,
    /// The layer's name as a number.
    layer: u64,
    /// Index of the first feature that this rank has.
    first_feature: usize,
    pass: DropoutPass,
}

impl Dropout {
    /// For the layer called `module`, of whose input features this rank has `shard`, or all.
    pub fn new(probability: f64, module: &str, shard: Option<&Shard>, pass: DropoutPass) -> Self {
        Self {
            probability,
            layer: XxHash64::oneshot(0, module.as_bytes()),
            first_feature: shard.map_or(0, |shard| shard.range.start),
            pass,
        }
    }

    /// What is to be multiplied with an input of shape `dims`, (.., features), in the type and on the device of `like`: 1 for what
    /// is kept, 0 for what is dropped; and what makes up for it, 1/(1-p). `None`: nothing is dropped in this pass.
    pub fn mask(&self, dims: &[usize], like: &Tensor) -> Result<Option<(Tensor, f64)>> {
        let Some(keys) = self.pass.get().filter(|_| self.probability > 0.0) else {
            return Ok(None);
        };
        let num_features = dims.last().copied().unwrap_or(1);
        let num_values: usize = dims.iter().product();
        if num_values != keys.keys.len() * keys.seq_len * num_features {
            bail!(
                "the input of a layer with dropout has shape {dims:?}; expected a row for each of the {} x {} positions of \
                 the micro-batch",
                keys.keys.len(),
                keys.seq_len
            );
        }
        // At most 2³² - 1, as the probability is less than 1.
        let threshold = (self.probability * (1u64 << 32) as f64) as u32;
        let mut mask = vec![0f32; num_values];
        let rows = mask.par_chunks_mut(num_features.max(1)).enumerate();
        rows.for_each(|(row, mask)| {
            let (sequence, position) = (row / keys.seq_len, row % keys.seq_len);
            let key = mix(mix(keys.keys[sequence] ^ self.layer).wrapping_add(position as u64));
            for (feature, value) in (self.first_feature as u64..).zip(mask) {
                let bits = (mix(key.wrapping_add(feature)) >> 32) as u32;
                *value = f32::from(u8::from(bits >= threshold));
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
