//! Values of flags that are names.

use candle_core::DType;
use candle_ops::MatmulPrecision;
use candle_parallel::{Recompute, ReduceType, Schedule, WeightFormat};
use clap::ValueEnum;

/// Choices are written as their names on a command line.
macro_rules! written_by_name {
    ($($choice:ty),*) => {$(
        impl serde::Serialize for $choice {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                let value = clap::ValueEnum::to_possible_value(self);
                serializer.serialize_str(value.as_ref().map_or("", |value| value.get_name()))
            }
        }
    )*};
}
pub(crate) use written_by_name;

written_by_name!(
    ScheduleChoice,
    LrScheduleChoice,
    RecomputeChoice,
    DTypeChoice,
    MatmulPrecisionChoice,
    BaseChoice,
    ReduceChoice,
    Quantization,
    StorageChoice
);

/// `--schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleChoice {
    /// One forward, one backward: with one stage on each of p ranks, rank r holds at most p - r micro-batches
    #[value(name = "1f1b")]
    OneForwardOneBackward,
    /// All forward passes, then all backward passes
    #[value(name = "gpipe")]
    GPipe,
    /// Gradients of weights wait until a rank would be idle; each rank holds about p micro-batches
    #[value(name = "zb-h1")]
    ZeroBubbleH1,
    /// More forward passes ahead: up to 2p - 1 micro-batches
    #[value(name = "zb-2p")]
    ZeroBubble2p,
    /// Two stages a rank, there and back over the ranks; about p micro-batches
    #[value(name = "zbv")]
    ZeroBubbleV,
    /// Stages as those of zbv, both ways at once; 2p micro-batches or more
    #[value(name = "dualpipev")]
    DualPipeV,
}

impl From<ScheduleChoice> for Schedule {
    fn from(choice: ScheduleChoice) -> Self {
        match choice {
            ScheduleChoice::OneForwardOneBackward => Schedule::OneForwardOneBackward,
            ScheduleChoice::GPipe => Schedule::GPipe,
            ScheduleChoice::ZeroBubbleH1 => Schedule::ZeroBubbleH1,
            ScheduleChoice::ZeroBubble2p => Schedule::ZeroBubble2p,
            ScheduleChoice::ZeroBubbleV => Schedule::ZeroBubbleV,
            ScheduleChoice::DualPipeV => Schedule::DualPipeV,
        }
    }
}

/// `--lr-schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LrScheduleChoice {
    /// Half a cosine down to the lowest rate
    Cosine,
    /// A straight line down to the lowest rate
    Linear,
    /// The highest rate to the end
    #[value(alias = "constant_with_warmup")]
    Constant,
    /// Warm-up, stable, decay: the highest rate, and over the last steps a straight line down
    #[value(alias = "warmup_stable_decay")]
    Wsd,
}

/// `--recompute`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeChoice {
    /// Keep what the backward pass reads, but for what takes next to no time to compute again, as norms and activations
    None,
    /// The same as none, which keeps the results of matrix products and of attention and little else
    Selective,
    /// Keep the input of each decoder layer and run its forward pass again
    Full,
}

impl RecomputeChoice {
    /// What a user is to know of the choice.
    pub fn note(self) -> Option<&'static str> {
        matches!(self, Self::Selective).then_some(
            "--recompute selective trains as none does: what is cheap to compute again is never kept",
        )
    }
}

impl From<RecomputeChoice> for Recompute {
    fn from(choice: RecomputeChoice) -> Self {
        match choice {
            RecomputeChoice::None | RecomputeChoice::Selective => Recompute::None,
            RecomputeChoice::Full => Recompute::Full,
        }
    }
}

/// `--dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DTypeChoice {
    /// 32-bit floats
    #[value(aliases = ["fp32", "float32", "float"])]
    F32,
    /// 16-bit floats with the range of f32; sums, gradients and the optimizer's copy of the weights stay f32
    #[value(alias = "bfloat16")]
    Bf16,
    /// 16-bit floats of a small range and three bits more, with dynamic loss scaling; the same stays f32
    #[value(aliases = ["fp16", "float16", "half"])]
    F16,
}

impl From<DTypeChoice> for DType {
    fn from(choice: DTypeChoice) -> Self {
        match choice {
            DTypeChoice::F32 => DType::F32,
            DTypeChoice::Bf16 => DType::BF16,
            DTypeChoice::F16 => DType::F16,
        }
    }
}

/// `--matmul-precision`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MatmulPrecisionChoice {
    /// All bits of each number
    Highest,
    /// 16 bits of each number on CPUs with AMX, 11 on GPUs (TF32); other CPUs do as for highest
    High,
}

impl From<MatmulPrecisionChoice> for MatmulPrecision {
    fn from(choice: MatmulPrecisionChoice) -> Self {
        match choice {
            MatmulPrecisionChoice::Highest => MatmulPrecision::Highest,
            MatmulPrecisionChoice::High => MatmulPrecision::High,
        }
    }
}

/// `--base-dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BaseChoice {
    /// 32-bit floats
    #[value(aliases = ["fp32", "float32", "float"])]
    F32,
    /// 16-bit floats with the range of f32
    #[value(alias = "bfloat16")]
    Bf16,
    /// 16-bit floats of a small range and three bits more
    #[value(aliases = ["fp16", "float16", "half"])]
    F16,
    /// Blocks of 32 values, 8 bits each and a scale
    #[value(name = "q8_0", aliases = ["q8", "int8", "8bit"])]
    Q8_0,
    /// Blocks of 256 values, 4 bits each with scales and minima of groups of 32
    #[value(name = "q4k", aliases = ["q4_k", "q4", "4bit"])]
    Q4K,
}

impl From<BaseChoice> for WeightFormat {
    fn from(choice: BaseChoice) -> Self {
        match choice {
            BaseChoice::F32 => WeightFormat::F32,
            BaseChoice::Bf16 => WeightFormat::BF16,
            BaseChoice::F16 => WeightFormat::F16,
            BaseChoice::Q8_0 => WeightFormat::Q8_0,
            BaseChoice::Q4K => WeightFormat::Q4K,
        }
    }
}

/// `--grad-reduce-dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReduceChoice {
    /// As they are kept
    #[value(aliases = ["fp32", "float32", "float"])]
    F32,
    /// Rounded: half the bytes, over nccl with --half-sums native only
    #[value(alias = "bfloat16")]
    Bf16,
}

impl From<ReduceChoice> for ReduceType {
    fn from(choice: ReduceChoice) -> Self {
        match choice {
            ReduceChoice::F32 => ReduceType::F32,
            ReduceChoice::Bf16 => ReduceType::Bf16,
        }
    }
}

/// `--quantize-weights` and `--quantize-gradients`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Quantization {
    /// Blocks of 256 values with a scale each (ZeRO++)
    Int8,
}

/// `--save-dtype`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StorageChoice {
    /// 32-bit floats
    #[value(aliases = ["fp32", "float32", "float"])]
    F32,
    /// 16-bit floats
    #[value(aliases = ["fp16", "float16", "half"])]
    F16,
    /// 16-bit floats with the range of f32
    #[value(alias = "bfloat16")]
    Bf16,
}

impl From<StorageChoice> for DType {
    fn from(choice: StorageChoice) -> Self {
        match choice {
            StorageChoice::F32 => DType::F32,
            StorageChoice::F16 => DType::F16,
            StorageChoice::Bf16 => DType::BF16,
        }
    }
}
