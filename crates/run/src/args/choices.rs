//! Values of flags that are names.

use std::fmt::Debug;

use candle_core::DType;
use candle_ops::MatmulPrecision;
use candle_parallel::{ContextMethod, Recompute, ReduceType, Schedule, WeightFormat};
use candle_train_models::GgufType;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::Serializer;
use serde::ser::Error;

/// A type of the library whose values a flag names.
pub trait Choice: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// Each value that the flag takes.
    const CHOICES: &'static [Named<Self>];

    /// The name of a value; empty if the flag does not take it.
    fn name_of(self) -> &'static str {
        let mut choices = Self::CHOICES.iter();
        choices
            .find(|choice| choice.value == self)
            .map_or("", |choice| choice.name)
    }
}

/// A value with its name.
pub struct Named<T: 'static> {
    value: T,
    name: &'static str,
    /// What others call it.
    others: &'static [&'static str],
    help: &'static str,
}

const fn named<T>(
    value: T,
    name: &'static str,
    others: &'static [&'static str],
    help: &'static str,
) -> Named<T> {
    Named {
        value,
        name,
        others,
        help,
    }
}

/// What reads such a value by its name.
pub fn choice<T: Choice>() -> impl TypedValueParser<Value = T> {
    let possible = T::CHOICES.iter().map(|choice| {
        let value = PossibleValue::new(choice.name).help(choice.help);
        value.aliases(choice.others)
    });
    PossibleValuesParser::new(possible).try_map(|said| {
        let is_it = |choice: &&Named<T>| {
            let mut names = choice.others.iter().chain([&choice.name]);
            names.any(|name| name.eq_ignore_ascii_case(&said))
        };
        let found = T::CHOICES.iter().find(is_it);
        found.map(|choice| choice.value).ok_or("expected a name")
    })
}

/// Writes it by its name, if the flag takes it.
pub(crate) fn by_name<T: Choice, S: Serializer>(
    value: &T,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match value.name_of() {
        "" => {
            let names: Vec<&str> = T::CHOICES.iter().map(|choice| choice.name).collect();
            Err(S::Error::custom(format_args!(
                "{value:?} is no value of the flag; expected one of {}",
                names.join(", ")
            )))
        }
        name => serializer.serialize_str(name),
    }
}

/// As [`by_name`] if there is one.
pub(crate) fn some_by_name<T: Choice, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match value {
        Some(value) => by_name(value, serializer),
        None => serializer.serialize_none(),
    }
}

impl Choice for Schedule {
    const CHOICES: &'static [Named<Self>] = &[
        named(
            Self::OneForwardOneBackward,
            "1f1b",
            &[],
            "One forward, one backward: with one stage on each of p ranks, rank r holds at most p - r micro-batches",
        ),
        named(
            Self::GPipe,
            "gpipe",
            &[],
            "All forward passes, then all backward passes",
        ),
        named(
            Self::ZeroBubbleH1,
            "zb-h1",
            &[],
            "Gradients of weights wait until a rank would be idle; each rank holds about p micro-batches",
        ),
        named(
            Self::ZeroBubble2p,
            "zb-2p",
            &[],
            "More forward passes ahead: up to 2p - 1 micro-batches",
        ),
        named(
            Self::ZeroBubbleV,
            "zbv",
            &[],
            "Two stages a rank, there and back over the ranks; about p micro-batches",
        ),
        named(
            Self::DualPipeV,
            "dualpipev",
            &[],
            "Stages as those of zbv, both ways at once; 2p micro-batches or more",
        ),
    ];
}

impl Choice for GgufType {
    const CHOICES: &'static [Named<Self>] = &[
        f32(Self::F32),
        f16(Self::F16),
        bf16(Self::Bf16),
        named(Self::Q8_0, "q8_0", &[], "8.5 bits a value"),
        named(Self::Q6K, "q6_k", &[], "6.6 bits a value"),
        named(
            Self::Q5KM,
            "q5_k_m",
            &[],
            "5.5 bits a value, and 6.6 in the head and in half of the layers' v and down",
        ),
        named(
            Self::Q4KM,
            "q4_k_m",
            &[],
            "4.5 bits a value, and 6.6 as with q5_k_m: what most people run",
        ),
        named(Self::Q4_0, "q4_0", &[], "4.5 bits a value, of blocks of 32"),
    ];
}

impl Choice for DType {
    const CHOICES: &'static [Named<Self>] = &[f32(Self::F32), bf16(Self::BF16), f16(Self::F16)];
}

const fn f32<T>(value: T) -> Named<T> {
    named(value, "f32", F32, "32-bit floats")
}

const fn bf16<T>(value: T) -> Named<T> {
    named(value, "bf16", BF16, "16-bit floats with the range of f32")
}

const fn f16<T>(value: T) -> Named<T> {
    let others = &["fp16", "float16", "half"];
    named(
        value,
        "f16",
        others,
        "16-bit floats of a small range and three bits more",
    )
}

/// What others call number types.
const F32: &[&str] = &["fp32", "float32", "float"];
const BF16: &[&str] = &["bfloat16"];

impl Choice for MatmulPrecision {
    const CHOICES: &'static [Named<Self>] = &[
        named(Self::Highest, "highest", &[], "All bits of each number"),
        named(
            Self::High,
            "high",
            &[],
            "16 bits of each number on CPUs with AMX, 11 on GPUs (TF32); other CPUs do as for highest",
        ),
    ];
}

impl Choice for WeightFormat {
    const CHOICES: &'static [Named<Self>] = &[
        f32(Self::F32),
        bf16(Self::BF16),
        f16(Self::F16),
        named(
            Self::Q8_0,
            "q8_0",
            &["q8", "int8", "8bit"],
            "Blocks of 32 values, 8 bits each and a scale",
        ),
        named(
            Self::Q4K,
            "q4k",
            &["q4_k", "q4", "4bit"],
            "Blocks of 256 values, 4 bits each with scales and minima of groups of 32",
        ),
    ];
}

impl Choice for ReduceType {
    const CHOICES: &'static [Named<Self>] = &[
        named(Self::F32, "f32", F32, "As they are kept"),
        named(
            Self::Bf16,
            "bf16",
            BF16,
            "Rounded: half the bytes, over nccl with --half-sums native only",
        ),
    ];
}

impl Choice for ContextMethod {
    const CHOICES: &'static [Named<Self>] = &[
        named(
            Self::Auto,
            "auto",
            &[],
            "Ring or Ulysses, whichever sends fewer bytes",
        ),
        named(
            Self::Ring,
            "ring",
            &[],
            "They go from rank to rank, while those that are here are used; any number of heads",
        ),
        named(
            Self::AllGather,
            "all-gather",
            &[],
            "Each rank gathers all of them, a layer at a time",
        ),
        named(
            Self::Ulysses,
            "ulysses",
            &[],
            "Ranks exchange heads for rows; no more ranks than query heads",
        ),
    ];
}

/// Values that only flags have are written as their names, too.
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
    LrScheduleChoice,
    RecomputeChoice,
    PackChoice,
    Quantization,
    GradientQuantization
);

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

/// `--pack-weights`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

/// `--quantize-weights`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Quantization {
    /// Blocks of 256 values with a scale each (ZeRO++)
    Int8,
}

/// `--quantize-gradients`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GradientQuantization {
    /// A quarter of the bytes
    Int8,
    /// An eighth; needs --zero-secondary
    Int4,
}
