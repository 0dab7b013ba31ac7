//! Values of flags that are names.

use std::fmt::Debug;

use candle_core::DType;
use candle_parallel::Recompute;
use clap::ValueEnum;
use clap::builder::{EnumValueParser, TypedValueParser};
use serde::ser::Error;
use serde::{Serialize, Serializer};

/// The name of a value; empty if its flag does not take it.
pub(crate) fn name_of<T: ValueEnum>(value: &T) -> String {
    let possible = value.to_possible_value();
    possible.map_or(String::new(), |value| value.get_name().to_string())
}

/// Writes a value by its name, if its flag takes it.
pub(crate) fn by_name<T: ValueEnum + Debug, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value.to_possible_value() {
        Some(name) => serializer.serialize_str(name.get_name()),
        None => Err(not_taken::<T, _>(value)),
    }
}

/// As [`by_name`] if there is one.
pub(crate) fn some_by_name<T: ValueEnum + Debug, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => by_name(value, serializer),
        None => serializer.serialize_none(),
    }
}

fn not_taken<T: ValueEnum, E: Error>(value: &impl Debug) -> E {
    let names: Vec<String> = T::value_variants().iter().map(name_of).collect();
    E::custom(format_args!(
        "{value:?} is no value of the flag; expected one of {}",
        names.join(", ")
    ))
}

/// The types of numbers that a flag takes.
#[derive(Clone, Copy, ValueEnum)]
enum FloatType {
    /// 32-bit floats
    #[value(aliases = ["fp32", "float32", "float"])]
    F32,
    /// 16-bit floats with the range of f32
    #[value(alias = "bfloat16")]
    Bf16,
    /// 16-bit floats of a small range and three bits more
    #[value(aliases = ["fp16", "float16", "half"])]
    F16,
}

/// What reads a type of numbers by its name.
pub fn float_type() -> impl TypedValueParser<Value = DType> {
    EnumValueParser::<FloatType>::new().map(|float| match float {
        FloatType::F32 => DType::F32,
        FloatType::Bf16 => DType::BF16,
        FloatType::F16 => DType::F16,
    })
}

/// Writes a type of numbers by its name, if there is one and flags take it.
pub(crate) fn some_float_type<S: Serializer>(
    value: &Option<DType>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        None => serializer.serialize_none(),
        Some(float @ (DType::F32 | DType::BF16 | DType::F16)) => {
            serializer.serialize_str(float.as_str())
        }
        Some(other) => Err(not_taken::<FloatType, _>(other)),
    }
}

/// `--lr-schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
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

/// `--pack-weights`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PackChoice {
    /// Those that a step uses several times between two updates, or that are frozen, if what the run is expected to hold then fits what the machine has left;
    /// none where --recompute, --offload, --tile-linears or --base-dtype asks for less memory
    Auto,
    /// All
    On,
    /// None
    Off,
}

/// `--recompute`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
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

/// `--quantize-weights`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Quantization {
    /// Blocks of 256 values with a scale each (ZeRO++)
    Int8,
}

/// `--quantize-gradients`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum GradientQuantization {
    /// A quarter of the bytes
    Int8,
    /// An eighth; needs --zero-secondary
    Int4,
}
