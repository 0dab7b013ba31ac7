//! Flags of batches: how many sequences at a time, and for how long.

use candle_trainer::{BatchConfig, BatchRamp, counted};
use clap::Args;
use serde::Serialize;

use crate::args::number::{real, whole};
use crate::args::sequences::SequenceArgs;
use crate::args::text::some_text;

/// Sequences of a step where nothing says.
const GLOBAL_BATCH_SIZE: usize = 16;

/// How batches are cut from the data, and how many.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BatchArgs {
    /// Sequences that pass through the model at once
    #[arg(long, default_value_t = 1, value_name = "SEQUENCES", value_parser = whole::<usize>(1..))]
    pub micro_batch_size: usize,
    /// The same as --micro-batch-size, with which a step has no more than that of each replica, times --gradient-accumulation-steps, unless
    /// --global-batch-size says otherwise [default: --micro-batch-size]
    #[arg(long, value_name = "SEQUENCES", conflicts_with = "micro_batch_size", value_parser = whole::<usize>(1..))]
    pub per_device_train_batch_size: Option<usize>,
    /// Sequences of an optimizer step, over all replicas [default: 16, or the next multiple of --micro-batch-size and --dp]
    #[arg(long, value_name = "SEQUENCES", value_parser = whole::<usize>(1..))]
    pub global_batch_size: Option<usize>,
    /// Micro-batches of each replica in an optimizer step: another way to say --global-batch-size
    #[arg(long, value_name = "MICRO_BATCHES", conflicts_with = "global_batch_size", value_parser = whole::<usize>(1..))]
    pub gradient_accumulation_steps: Option<usize>,
    /// Begin with START sequences in a step, and add INCREMENT at a time until there are --global-batch-size after SAMPLES sequences, such as 16,8,10000;
    /// the learning rate follows the samples, so that --warmup-steps and all fractions are of steps of full size [default: the full size from the first step on]
    #[arg(long, value_name = "START,INCREMENT,SAMPLES")]
    #[serde(serialize_with = "some_text")]
    pub batch_ramp: Option<BatchRamp>,
    /// How records become sequences.
    #[command(flatten)]
    #[serde(flatten)]
    pub sequences: SequenceArgs,
    /// Whether the number of replicas need not divide the global batch: shares of a step then differ by at most one sample.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) uneven: bool,
    /// Whether the number of replicas follows from the ranks.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) may_change: bool,
    /// Optimizer steps, in place of --epochs [default: as many as --epochs takes]
    ///
    /// 0: save the model as it is.
    #[arg(long, visible_alias = "max-steps", value_name = "STEPS", conflicts_with = "epochs", value_parser = whole::<usize>(0..))]
    pub steps: Option<usize>,
    /// Stop after the step in which so many seconds have passed since the start, and save [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64>(1..))]
    pub max_secs: Option<u64>,
    /// Passes over the data, such as 3 or 0.5
    #[arg(long, visible_alias = "num-train-epochs", default_value = "3", value_name = "PASSES", value_parser = real(0.0..=1e9))]
    pub epochs: f64,
    /// Take the sequences in the order of the data instead of a new random order each epoch
    #[arg(long)]
    pub no_shuffle: bool,
    /// Seed of everything random
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>(0..))]
    pub seed: u64,
}

impl BatchArgs {
    /// Sequences of an optimizer step.
    pub fn global_batch_size(&self) -> usize {
        self.global_batch_size.unwrap_or(GLOBAL_BATCH_SIZE)
    }

    /// Positions of an optimizer step.
    pub fn num_tokens(&self) -> usize {
        self.global_batch_size() * self.sequences.seq_len()
    }

    /// Sequences of all epochs, where one has so many.
    pub fn end_of_epochs(&self, num_samples: usize) -> usize {
        let end = self.epochs * num_samples as f64;
        // 1.1 x 100 is a little more than 110.
        (end * (1.0 - 1e-12)).ceil() as usize
    }

    /// Sequences of a step.
    pub(crate) fn size_in_words(&self) -> String {
        let size = counted(self.global_batch_size(), "sequence");
        match self.batch_ramp {
            Some(BatchRamp { start, samples, .. }) => {
                format!("{start} to {size} (after the first {samples})")
            }
            None => size,
        }
    }

    /// How samples become batches.
    pub fn config(&self) -> BatchConfig {
        BatchConfig {
            micro_batch_size: self.micro_batch_size,
            global_batch_size: self.global_batch_size(),
            shuffle: !self.no_shuffle,
            seed: self.seed,
            uneven: self.uneven,
            ramp: self.batch_ramp,
        }
    }
}
