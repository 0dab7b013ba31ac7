//! Flags of the optimizer: how weights change.

use std::ops::Bound::{Excluded, Unbounded};

use candle_parallel::AdamWConfig;
use candle_trainer::{LossHistory, LossRange, LrDecay};
use clap::Args;
use serde::Serialize;

use crate::args::choices::LrScheduleChoice;
use crate::args::freeze::FreezeArgs;
use crate::args::loss_scale::LossScaleArgs;
use crate::args::number::{real, whole};

/// Learning rate where nothing says.
const LR: f64 = 2e-5;
/// Part of the steps in which the rate of a WSD schedule falls.
const WSD_DECAY_RATIO: f64 = 0.2;

/// How weights change.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct OptimizerArgs {
    /// Weights that do not change.
    #[command(flatten)]
    #[serde(flatten)]
    pub freeze: FreezeArgs,
    /// Highest learning rate, reached at the end of the warm-up [default: 2e-5, of adapters 2e-4]
    #[arg(long, visible_alias = "learning-rate", value_name = "RATE", value_parser = real(0.0..))]
    pub lr: Option<f64>,
    /// How the learning rate falls after the warm-up
    #[arg(
        long,
        visible_alias = "lr-scheduler-type",
        default_value = "cosine",
        value_name = "SCHEDULE"
    )]
    pub lr_schedule: LrScheduleChoice,
    /// Last part of the steps, in which the rate of --lr-schedule wsd falls [default: 0.2]
    #[arg(long, value_name = "FRACTION", value_parser = real(0.0..=1.0))]
    pub lr_decay_ratio: Option<f64>,
    /// Learning rate at the end, as a fraction of --lr; not for --lr-schedule constant
    #[arg(long, default_value_t = 0.1, value_name = "FRACTION", value_parser = real(0.0..=1.0))]
    pub min_lr_ratio: f64,
    /// First part of the steps, over which the learning rate rises linearly
    #[arg(long, default_value_t = 0.03, value_name = "FRACTION", value_parser = real(0.0..=1.0))]
    pub warmup_ratio: f64,
    /// The same as a number of steps, in place of --warmup-ratio
    #[arg(long, value_name = "STEPS", conflicts_with = "warmup_ratio", value_parser = whole::<usize>(0..))]
    pub warmup_steps: Option<usize>,
    /// Decoupled weight decay of AdamW per step and unit of learning rate, for tensors of two or more dims
    #[arg(long, default_value_t = 0.01, value_name = "RATE", value_parser = real(0.0..))]
    pub weight_decay: f64,
    /// Decay of AdamW's average of the gradients, β₁
    #[arg(long, default_value_t = AdamWConfig::default().beta1, value_name = "DECAY", value_parser = real(0.0..1.0))]
    pub adam_beta1: f64,
    /// Decay of AdamW's average of the squared gradients, β₂
    #[arg(long, default_value_t = AdamWConfig::default().beta2, value_name = "DECAY", value_parser = real(0.0..1.0))]
    pub adam_beta2: f64,
    /// What AdamW adds to the root of the second average, ε
    #[arg(long, default_value = "1e-8", value_name = "EPSILON", value_parser = real((Excluded(0.0), Unbounded)))]
    pub adam_eps: f64,
    /// Gradients are scaled down to this global L2 norm; 0: never
    #[arg(long, default_value_t = 1.0, value_name = "NORM", value_parser = real(0.0..))]
    pub max_grad_norm: f64,
    /// Loss scaling of f16.
    #[command(flatten)]
    #[serde(flatten)]
    pub loss_scale: LossScaleArgs,
    /// A loss of more than so many times the median of the last 100 usual ones, which counts as 0.1 at least, is out of its range: a warning
    /// says so, and the newest checkpoint from before it is kept while it lasts
    #[arg(long, default_value_t = LossRange::default().max_ratio, value_name = "RATIO", value_parser = real((Excluded(1.0), Unbounded)))]
    pub max_loss_ratio: f64,
    /// End the run at the first loss that is out of the range of --max-loss-ratio, as at one that is NaN or infinite
    #[arg(long)]
    pub stop_on_divergence: bool,
}

impl OptimizerArgs {
    /// Highest learning rate.
    pub fn lr(&self) -> f64 {
        self.lr.unwrap_or(LR)
    }

    /// The range in which losses are usual, after those of the run so far.
    pub fn loss_range(&self, losses: Option<LossHistory>) -> LossRange {
        LossRange {
            max_ratio: self.max_loss_ratio,
            stops: self.stop_on_divergence,
            history: losses.unwrap_or_default(),
        }
    }

    /// Steps of the warm-up; of a fraction at least one, as long as there is a warm-up.
    pub(crate) fn warmup_steps(&self, num_steps: f64) -> usize {
        let steps = (self.warmup_ratio * num_steps).ceil();
        // The whole of a run that ends in its batch ramp would be a part of a step.
        let is_all = steps >= num_steps && num_steps.fract() != 0.0;
        let steps = if is_all { 0.0 } else { steps };
        self.warmup_steps.unwrap_or(steps as usize)
    }

    pub(crate) fn decay(&self) -> LrDecay {
        match self.lr_schedule {
            LrScheduleChoice::Cosine => LrDecay::Cosine,
            LrScheduleChoice::Linear => LrDecay::Linear,
            LrScheduleChoice::Constant => LrDecay::Constant,
            LrScheduleChoice::Wsd => LrDecay::Wsd(self.lr_decay_ratio.unwrap_or(WSD_DECAY_RATIO)),
        }
    }
}
