//! How data-parallel replicas work together.

use candle_core::{Error, Result, bail};
use candle_ops::QuantizedType;
use serde::{Deserialize, Serialize};

/// What data-parallel ranks divide between them (ZeRO, arXiv:1910.02054). Each stage divides what the one before it does, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ZeroStage {
    /// Nothing: gradients are all-reduced, every rank updates everything.
    Zero,
    /// Optimizer state: gradients are reduce-scattered, each rank updates its slice, weights are all-gathered.
    One,
    /// Gradients: they are reduce-scattered when a micro-batch's backward pass leaves their block, and only the rank's slice is kept.
    Two,
    /// Weights: a block's are gathered before its forward and its backward pass, and freed after.
    Three,
}

impl TryFrom<u8> for ZeroStage {
    type Error = Error;

    /// The stage of a number from 0 to 3.
    fn try_from(number: u8) -> Result<Self> {
        match number {
            0 => Ok(Self::Zero),
            1 => Ok(Self::One),
            2 => Ok(Self::Two),
            3 => Ok(Self::Three),
            _ => bail!("ZeRO stage {number}; expected 0, 1, 2 or 3"),
        }
    }
}

/// In what form gradients move between replicas. They are added in f32, but for what NCCL adds itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum ReduceType {
    /// As they are kept.
    #[default]
    #[cfg_attr(feature = "clap", value(aliases = ["fp32", "float32", "float"]))]
    F32,
    /// Rounded: half the bytes, over nccl with --half-sums native only.
    ///
    /// Each rank's sum over its micro-batches, or with ZeRO-2 and 3 each micro-batch's gradient, is rounded, and
    /// the sum over the ranks is rounded again. Over NCCL only if it is to make such sums itself
    /// ([`HalfSums::Native`](candle_comm::HalfSums)), which rounds after each addition. Between groups of replicas, which move
    /// slices only, f32.
    #[cfg_attr(feature = "clap", value(alias = "bfloat16"))]
    Bf16,
    /// About a quarter: each rank's summands are rounded to 8 bits, 256 values with one scale (arXiv:2306.10209). With
    /// [`DataParallel::zero_secondary`] and more than one such group in two hops: over the ranks of a group first, whose sums are rounded again
    /// before they are added to those of the other groups. Between groups of replicas that hold the same, which move slices only, f32.
    #[cfg_attr(feature = "clap", value(skip))]
    Int8,
    /// About an eighth: the same in 4 bits. Needs [`DataParallel::zero_secondary`].
    #[cfg_attr(feature = "clap", value(skip))]
    Int4,
}

impl ReduceType {
    /// In what form values are packed, if they are.
    pub(crate) fn quantized(self) -> Option<QuantizedType> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 => Some(QuantizedType::Int8),
            Self::Int4 => Some(QuantizedType::Int4),
        }
    }
}

/// How data-parallel replicas work together: see [`ParamStore::with_data_parallel`](crate::ParamStore::with_data_parallel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataParallel {
    /// What the replicas divide between them.
    pub zero: ZeroStage,
    /// Number of neighbouring replicas that divide it; groups of so many hold the same (hybrid sharding, arXiv:2304.11277,
    /// section 3.2.2). `None`: all replicas.
    pub zero_group: Option<usize>,
    /// Number of neighbouring replicas among those that divide the weights (ZeRO-3), which keep a second copy of them, divided between
    /// them alone, from the first time in a step that these are gathered to the next update: from then on weights come from there (hpZ of
    /// ZeRO++, arXiv:2306.10209, section 3.2). `None`: no such copy. The bits are the same.
    pub zero_secondary: Option<usize>,
    /// In what form gradients move.
    pub reduce: ReduceType,
    /// Whether the weights that ZeRO-3 gathers move as 8 bits, 256 values with one scale (arXiv:2306.10209). A block computes with
    /// what arrives, the same on every rank; updates and checkpoints have the exact values.
    pub quantize_weights: bool,
    /// In how many tiles of rows the weights that come for the passes do, with ZeRO-3 or [offloaded](crate::Offload::params): the weight of a linear layer, of the embedding and of the head, each freed before
    /// the one after the next comes: memory-centric tiling (arXiv:2104.07857, section 5.1.3). 1: whole, with its block. With more each
    /// pass of such a layer is a collective: all replicas must run the same layers in the same order.
    pub tile_linears: usize,
    /// Whether communication runs under computation: gradients are reduced under the backward pass, updated weights gathered
    /// under the next forward pass. The bits are the same without.
    ///
    /// With it, weights that other replicas updated arrive after the update has returned. A [`ModelPart`](crate::ModelPart) waits for those
    /// of a block before it runs the block, and [`Param::values`](crate::Param::values) waits for all. Code that runs layers or reads
    /// their tensors outside of a stage calls [`Parameters::wait_for_updates`](crate::Parameters::wait_for_updates) first.
    pub overlap: bool,
}

impl Default for DataParallel {
    /// ZeRO-1 over all replicas, overlapping.
    fn default() -> Self {
        Self {
            zero: ZeroStage::One,
            zero_group: None,
            zero_secondary: None,
            reduce: ReduceType::F32,
            quantize_weights: false,
            tile_linears: 1,
            overlap: true,
        }
    }
}

impl From<ZeroStage> for DataParallel {
    fn from(zero: ZeroStage) -> Self {
        Self {
            zero,
            ..Self::default()
        }
    }
}

impl DataParallel {
    /// An error if these settings contradict each other or do not fit `dp` replicas.
    ///
    /// # Errors
    /// The one that it is for.
    pub fn validate(&self, dp: usize) -> Result<()> {
        if self.quantize_weights && self.zero != ZeroStage::Three {
            bail!(
                "quantize-weights is given without ZeRO stage 3, which alone gathers weights for the passes\nhint: use ZeRO stage 3, \
                 or leave it out"
            )
        }
        if self.tile_linears == 0 {
            bail!("tile-linears is 0; expected the number of tiles, from 1 on")
        }
        if self.reduce.quantized().is_some() && self.zero == ZeroStage::Zero {
            bail!(
                "quantize-gradients is given with ZeRO stage 0, whose sums each rank needs whole\nhint: use ZeRO stage 1, 2 or 3, \
                 which divide them, or gradients that move as bf16"
            )
        }
        if (self.reduce, self.zero_secondary) == (ReduceType::Int4, None) {
            bail!(
                "quantize-gradients(int4) is given without zero-secondary, within whose groups gradients are summed before they move to the \
                 other ones\nhint: give zero-secondary, or use int8"
            )
        }
        if let (ZeroStage::Zero, Some(_)) = (self.zero, self.zero_group) {
            bail!(
                "zero-group is given with ZeRO stage 0, which divides nothing\nhint: use ZeRO stage 1, 2 or 3, or leave it out"
            )
        }
        if let Some(len) = self.zero_group {
            check_divides(("zero-group", len), ("dp", dp), "divide over all replicas")?;
        }
        let Some(len) = self.zero_secondary else {
            return Ok(());
        };
        if self.zero != ZeroStage::Three {
            bail!(
                "zero-secondary({len}) is given without ZeRO stage 3, which alone gathers weights for the passes\nhint: use ZeRO stage 3, or \
                 leave it out"
            )
        }
        if self.tile_linears > 1 {
            bail!(
                "zero-secondary({len}) is given with tile-linears({}), whose tiles come from the slices of all replicas\nhint: leave one of \
                 the two out",
                self.tile_linears
            )
        }
        let (name, num_slices) = match self.zero_group {
            Some(group) => ("zero-group", group),
            None => ("dp", dp),
        };
        check_divides(
            ("zero-secondary", len),
            (name, num_slices),
            "keep no second copy",
        )
    }
}

/// An error unless groups of `len` ranks divide the `number` replicas that `of` counts; without them is what `otherwise` says.
fn check_divides(
    (what, len): (&str, usize),
    (of, number): (&str, usize),
    otherwise: &str,
) -> Result<()> {
    if len >= 2 && number.is_multiple_of(len) {
        return Ok(());
    }
    let around = |far: usize| [len.checked_sub(far), len.checked_add(far)];
    let mut others = (1..=MAX_DISTANCE).flat_map(around).flatten();
    let is_divisor = |other: &usize| (2..=number).contains(other) && number.is_multiple_of(*other);
    let hint = match others.find(is_divisor) {
        Some(nearest) => {
            format!("choose a divisor of {number}, such as {nearest}, or leave it out")
        }
        None => "leave it out".to_string(),
    };
    bail!(
        "{what}({len}) does not divide {of}({number}) replicas into groups of at least two\nhint: {hint} to {otherwise}"
    )
}

/// How far from the size of a group others are looked for that fit.
const MAX_DISTANCE: usize = 1 << 12;

impl DataParallel {
    /// Into how many slices `dp` replicas divide what they divide.
    pub(crate) fn num_slices(&self, dp: usize) -> usize {
        match self.zero {
            ZeroStage::Zero => 1,
            _ => self.zero_group.unwrap_or(dp),
        }
    }

    /// The multiple of values at which each parameter begins in a bucket. Values that move in 8 or 4 bits share a scale with their
    /// block, so no block has values of two parameters: a small one beside a large one would be lost.
    pub(crate) fn slot_alignment(&self) -> usize {
        if self.quantize_weights || self.reduce.quantized().is_some() {
            QuantizedType::BLOCK
        } else {
            1
        }
    }

    /// The number of groups between which quantized gradients make a second hop, if they do; `num_slices` ranks divide everything.
    pub(crate) fn num_hop_groups(&self, num_slices: usize) -> Option<usize> {
        self.reduce.quantized()?;
        let number = num_slices / self.zero_secondary?;
        (number > 1).then_some(number)
    }
}
