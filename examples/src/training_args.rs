//! Flags of a training run: layout, batches, optimizer.

use std::path::PathBuf;

use candle_comm::{Degrees, RunConfig};
use candle_core::{Device, Result, bail};
use candle_parallel::{AdamWConfig, ZeroStage};
use candle_train::{BatchConfig, Batches, LrSchedule, Metrics, Tokens, TrainConfig};
use clap::Args;

use crate::choices::{DTypeChoice, ScheduleChoice};
use crate::freeze::FreezeArgs;
use crate::rank_args::RankArgs;

/// Everything about a run but its model and its data.
#[derive(Args, Clone, Debug)]
pub struct TrainingArgs {
    /// Tensor-parallel degree: ranks that share each layer
    #[arg(
        long,
        default_value_t = 2,
        value_name = "RANKS",
        help_heading = "Layout"
    )]
    pub tp: usize,
    /// Pipeline-parallel degree: stages of consecutive layers
    #[arg(
        long,
        default_value_t = 2,
        value_name = "STAGES",
        help_heading = "Layout"
    )]
    pub pp: usize,
    /// Data-parallel degree: replicas that share each global batch
    #[arg(
        long,
        default_value_t = 2,
        value_name = "REPLICAS",
        help_heading = "Layout"
    )]
    pub dp: usize,
    /// ZeRO stage: 0 keeps the optimizer state whole on every replica, 1 divides it over them
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1), help_heading = "Layout")]
    pub zero: u8,
    /// Communicate between data-parallel ranks only when nothing is computed; slower, and the same bits
    #[arg(long, help_heading = "Layout")]
    pub no_overlap: bool,
    /// Order of the micro-batches in the pipeline
    #[arg(long, default_value = "1f1b", help_heading = "Layout")]
    pub schedule: ScheduleChoice,
    /// Where and how its ranks run
    #[command(flatten, next_help_heading = "Ranks")]
    pub ranks: RankArgs,
    /// Type of weights and activations while training
    #[arg(long, default_value = "f32", help_heading = "Layout")]
    pub dtype: DTypeChoice,
    /// What stays as it is
    #[command(flatten, next_help_heading = "Optimizer")]
    pub freeze: FreezeArgs,

    /// Sequences that pass through the model at once
    #[arg(
        long,
        default_value_t = 4,
        value_name = "SEQUENCES",
        help_heading = "Batches"
    )]
    pub micro_batch_size: usize,
    /// Sequences of an optimizer step, over all replicas
    #[arg(
        long,
        default_value_t = 16,
        value_name = "SEQUENCES",
        help_heading = "Batches"
    )]
    pub global_batch_size: usize,
    /// Length of a sequence
    #[arg(
        long,
        default_value_t = 128,
        value_name = "TOKENS",
        help_heading = "Batches"
    )]
    pub seq_len: usize,
    /// Optimizer steps; wins over --epochs. 0: save the model as it is [default: as many as --epochs takes]
    #[arg(long, value_name = "STEPS", help_heading = "Batches")]
    pub steps: Option<usize>,
    /// Passes over the data
    #[arg(
        long,
        default_value_t = 3,
        value_name = "PASSES",
        help_heading = "Batches"
    )]
    pub epochs: usize,
    /// Take the sequences in the order of the data instead of a new random order each epoch
    #[arg(long, help_heading = "Batches")]
    pub no_shuffle: bool,
    /// Seed of everything random
    #[arg(long, default_value_t = 0, help_heading = "Batches")]
    pub seed: u64,

    /// Highest learning rate, reached at the end of the warm-up
    #[arg(
        long,
        default_value_t = 1e-3,
        value_name = "RATE",
        help_heading = "Optimizer"
    )]
    pub lr: f64,
    /// Learning rate at the end, as a fraction of --lr; a half cosine leads there
    #[arg(
        long,
        default_value_t = 0.1,
        value_name = "FRACTION",
        help_heading = "Optimizer"
    )]
    pub min_lr_ratio: f64,
    /// Steps over which the learning rate rises linearly
    #[arg(
        long,
        default_value_t = 5,
        value_name = "STEPS",
        help_heading = "Optimizer"
    )]
    pub warmup_steps: usize,
    /// Decoupled weight decay of AdamW per step and unit of learning rate, for tensors of two or more dims
    #[arg(
        long,
        default_value_t = 0.1,
        value_name = "RATE",
        help_heading = "Optimizer"
    )]
    pub weight_decay: f64,
    /// Gradients are scaled down to this global L2 norm
    #[arg(
        long,
        default_value_t = 1.0,
        value_name = "NORM",
        help_heading = "Optimizer"
    )]
    pub max_grad_norm: f64,

    /// Write one JSON object per step to this file: step, loss, grad_norm, learning_rate, num_tokens, tokens_per_sec, step_secs [default: none]
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub metrics: Option<PathBuf>,
}

impl TrainingArgs {
    /// The mesh's degrees.
    pub fn degrees(&self) -> Degrees {
        Degrees {
            pp: self.pp,
            dp: self.dp,
            cp: 1,
            tp: self.tp,
        }
    }

    /// How this process takes part in the run; degrees of 0 and products that overflow are errors.
    pub fn run_config(&self) -> Result<RunConfig> {
        for (name, degree) in [("pp", self.pp), ("dp", self.dp), ("tp", self.tp)] {
            if degree == 0 {
                bail!("--{name} is 0; expected at least 1");
            }
        }
        match self.degrees().world_size() {
            Some(world_size) if world_size <= MAX_RANKS => self.ranks.config(self.degrees()),
            _ => bail!(
                "pp({}) * dp({}) * tp({}) is more than {MAX_RANKS} ranks; expected a number that machines can run",
                self.pp,
                self.dp,
                self.tp
            ),
        }
    }

    /// Checks that the metrics can be written, without changing what the file holds.
    pub fn check_metrics(&self) -> Result<()> {
        self.metrics.as_ref().map(Metrics::create).transpose()?;
        Ok(())
    }

    /// An error if sequences are longer than the model allows.
    pub fn check_positions(&self, max_position_embeddings: usize) -> Result<()> {
        if self.seq_len > max_position_embeddings {
            bail!(
                "--seq-len {} is longer than the model's max_position_embeddings ({max_position_embeddings})",
                self.seq_len
            );
        }
        Ok(())
    }

    /// The run in one line.
    pub fn describe(&self, tokens: &Tokens, num_steps: usize, run: &RunConfig) -> String {
        format!(
            "{} tokens, {num_steps} steps of {} sequences of {} tokens; {} ranks {}: pp {} x dp {} x tp {}, ZeRO-{}",
            tokens.len(),
            self.global_batch_size,
            self.seq_len,
            self.pp * self.dp * self.tp,
            run.describe(),
            self.pp,
            self.dp,
            self.tp,
            self.zero
        )
    }

    /// How batches are cut from the data.
    pub fn batch_config(&self) -> BatchConfig {
        BatchConfig {
            seq_len: self.seq_len,
            micro_batch_size: self.micro_batch_size,
            global_batch_size: self.global_batch_size,
            shuffle: !self.no_shuffle,
            seed: self.seed,
        }
    }

    /// The optimizer's and the trainer's configuration for a run over these tokens; checks everything it can.
    pub fn train_config(&self, tokens: &Tokens) -> Result<TrainConfig> {
        let batches = Batches::new(tokens, self.batch_config(), 0, self.dp, &Device::Cpu)?;
        let config = TrainConfig {
            lr_schedule: LrSchedule {
                lr: self.lr,
                min_lr_ratio: self.min_lr_ratio,
                warmup_steps: self.warmup_steps,
                num_steps: self
                    .steps
                    .unwrap_or(self.epochs.saturating_mul(batches.num_steps_per_epoch())),
            },
            adamw: AdamWConfig {
                weight_decay: self.weight_decay,
                ..AdamWConfig::default()
            },
            max_grad_norm: Some(self.max_grad_norm),
            zero: match self.zero {
                0 => ZeroStage::Zero,
                _ => ZeroStage::One,
            },
            overlap: !self.no_overlap,
            schedule: self.schedule.into(),
        };
        config.validate()?;
        Ok(config)
    }
}

/// More ranks than this are a slip of the keyboard.
const MAX_RANKS: usize = 1024;
