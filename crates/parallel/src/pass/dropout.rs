//! Dropout whose mask is a function of what is trained on, and of no random state: the same bits on every layout, and when a forward
//! pass runs again.
//!
//! Whether a value is dropped follows from the seed, the number of updates that were made, what the sequence holds, the layer's name (of a
//! block in plain candle, the block and a name), and the value's index in each dim of the whole tensor. A sequence is known by its tokens and
//! targets up to its last target: what pads it changes nothing.

use std::hash::Hasher;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::IGNORE_INDEX;
use rayon::prelude::*;
use twox_hash::XxHash64;

use super::pass::Pass;
use super::region::Region;
use crate::placement::{Indices, Shard};

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
        let is_whole = cut.is_none_or(|cut| cut.rows.len() == num_rows);
        if !is_whole || (cut.is_none() && !num_rows.is_multiple_of(keys.len().max(1))) {
            bail!(
                "the input of a layer with dropout has shape {dims:?}; expected as many rows for each of the {} sequences of the micro-batch",
                keys.len()
            );
        }
        let seq_len = match cut {
            None => num_rows / keys.len().max(1),
            Some(cut) => cut.whole.dims()?.1,
        };
        let row = |row| {
            let row = cut.map_or(row, |cut| cut.rows[row] as usize);
            at(keys[row / seq_len] ^ self.layer, row % seq_len)
        };
        let rows: Vec<u64> = (0..num_rows).map(row).collect();
        let features = match &self.features {
            None => (0..num_features).collect(),
            Some(held) => held.ranges().iter().cloned().flatten().collect(),
        };
        draw(self.probability, &rows, Some(features), like)?
            .reshape(dims)
            .map(|mask| Some((mask, factor(self.probability))))
    }
}

/// Which part this rank has of a tensor (samples, ..).
pub(super) enum MaskPlace<'a> {
    /// The rank's rows outside of this region.
    Outside(&'a Region),
    /// Inside of a region, of all rows this part of one dim.
    Inside(&'a Shard),
}

impl MaskPlace<'_> {
    /// What `xs` is to be multiplied with if each value is dropped with this probability by what is called `name`; `None`: nothing is dropped in
    /// this pass.
    pub fn mask(
        &self,
        xs: &Tensor,
        probability: f64,
        name: &str,
        pass: &Pass,
    ) -> Result<Option<Tensor>> {
        self.check_shard(xs)?;
        let Some(SequenceKeys(keys)) = pass.sequence_keys()? else {
            return Ok(None);
        };
        let layer = XxHash64::oneshot(1 + pass.block as u64, name.as_bytes());
        let keys: Vec<u64> = keys.iter().map(|key| key ^ layer).collect();
        let (mut rows, first) = self.rows(xs, keys, pass)?;
        if probability == 0.0 {
            return Ok(None);
        }
        let last = xs.rank().saturating_sub(1).max(first);
        for dim in first..last {
            let indices = self.indices(xs, dim);
            let keys = rows.iter();
            let keys = keys.flat_map(|&key| indices.iter().map(move |&index| at(key, index)));
            rows = keys.collect();
        }
        let features = (last < xs.rank()).then(|| self.indices(xs, last));
        let mask = draw(probability, &rows, features, xs)?.reshape(xs.dims())?;
        (mask * factor(probability)).map(Some)
    }

    /// Which indices of a dim of the whole tensor this rank has.
    fn indices(&self, xs: &Tensor, dim: usize) -> Vec<usize> {
        match self {
            Self::Inside(shard) if shard.dim() == dim => {
                shard.ranges().iter().cloned().flatten().collect()
            }
            _ => (0..xs.dims()[dim]).collect(),
        }
    }

    fn check_shard(&self, xs: &Tensor) -> Result<()> {
        let Self::Inside(shard) = self else {
            return Ok(());
        };
        let (dim, dims) = (shard.dim(), xs.dims());
        if dim == 0 {
            bail!(
                "the shard is of dim 0, which is that of the samples, of a tensor of shape {dims:?}\nhint: shard.along(2) is the same part of dim 2, \
                 the features of (b, t, features)"
            );
        }
        if dims.get(dim) != Some(&shard.len()) {
            bail!(
                "the tensor has shape {dims:?}; expected {} indices of dim {dim}, this rank's part of {}\nhint: shard.along(dim) is the same part of \
                 another dim",
                shard.len(),
                shard.global()
            );
        }
        Ok(())
    }

    /// A key for each row, from those of the sequences, and the first dim that is not in it.
    fn rows(&self, xs: &Tensor, keys: Vec<u64>, pass: &Pass) -> Result<(Vec<u64>, usize)> {
        let (dims, num_samples) = (xs.dims(), keys.len());
        let cut = pass.of_cut();
        let (b, t) = pass.dims().unwrap_or((num_samples, 1));
        let (own, (own_b, own_t), divides_rows) = match self {
            Self::Inside(_) => (0..b * t, (b, t), false),
            Self::Outside(region) => (
                region.own_rows(b * t),
                region.dims_outside(b, t),
                region.divides_rows() || pass.divides_rows(),
            ),
        };
        let is_whole = cut.is_none() && !divides_rows;
        // With one position each, samples are rows.
        if is_whole && t > 1 && dims.first() == Some(&num_samples) {
            return Ok((keys, 1));
        }
        if !is_whole && xs.rank() > 3 && dims[1] == own_t && dims[2] == own_t {
            bail!(
                "the tensor has shape {dims:?}, whose dims 1 and 2 may both be the {own_t} rows of this rank\nhint: reshape it to \
                 ({own_b}, {own_t}, ..) with another dim 2; attention's probabilities are dropped by Pass::dropout_sharded"
            );
        }
        let num_dims = 1 + usize::from(dims.starts_with(&[own_b, own_t]));
        let is_sharded = matches!(self, Self::Inside(shard) if shard.dim() < num_dims);
        if is_sharded || (num_dims == 1 && dims.first() != Some(&own.len())) {
            let expected = if is_whole {
                format!("{num_samples} samples in dim 0, or {} rows", own.len())
            } else {
                format!("({own_b}, {own_t}, ..) or ({}, ..)", own.len())
            };
            bail!(
                "the tensor has shape {dims:?}; expected what this rank has of the rows of the micro-batch, {expected}\nhint: Pass::dropout is for what is \
                 outside of the region of ModelPart::with_region, and gets that region; Pass::dropout_sharded for what is inside"
            );
        }
        let seq_len = match cut {
            None => t,
            Some(cut) => cut.whole.dims()?.1,
        };
        let rows = own.map(|row| {
            let row = cut.map_or(row, |cut| cut.rows[row] as usize);
            at(keys[row / seq_len], row % seq_len)
        });
        Ok((rows.collect(), num_dims))
    }
}

/// 1 for what is kept and 0 for what is dropped of each row, by its key, and feature, in the type and on the device of `like`; without features a value
/// for each row.
fn draw(
    probability: f64,
    rows: &[u64],
    features: Option<Vec<usize>>,
    like: &Tensor,
) -> Result<Tensor> {
    // At most 2³² - 1, as the probability is less than 1.
    let threshold = (probability * (1u64 << 32) as f64) as u32;
    let is_kept = |key| f32::from(u8::from((mix(key) >> 32) as u32 >= threshold));
    let num_features = features.as_ref().map_or(1, Vec::len);
    let mut mask = vec![0f32; rows.len() * num_features];
    let of_rows = mask.par_chunks_mut(num_features.max(1)).zip(rows);
    of_rows.for_each(|(mask, &row)| match &features {
        None => mask.fill(is_kept(row)),
        Some(features) => {
            let row = mix(row);
            for (value, &feature) in mask.iter_mut().zip(features) {
                *value = is_kept(row.wrapping_add(feature as u64));
            }
        }
    });
    let mask = Tensor::from_vec(mask, rows.len() * num_features, &Device::Cpu)?;
    mask.to_dtype(like.dtype())?.to_device(like.device())
}

/// The factor of values that are kept: 1 / (1 - p).
fn factor(probability: f64) -> f64 {
    1.0 / (1.0 - probability)
}

/// The key of what is at `index` of the next dim.
fn at(key: u64, index: usize) -> u64 {
    mix(key).wrapping_add(index as u64)
}

/// The output function of SplitMix64: every bit of the result depends on every bit of `value`.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
