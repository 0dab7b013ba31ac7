//! What a run of a checkpoint takes where no flag says: fit for the model and the machine.

use candle_comm::{RankEnv, RunConfig};
use candle_core::{Device, Result};
use candle_train_models::ModelConfig;

use crate::choices::DTypeChoice;
use crate::flags::Flags;
use crate::number::written;
use crate::run_record::GLOBAL_BATCH_SIZE;
use crate::training_args::{BatchArgs, TrainingArgs};

/// Longest sequence that is taken by default: more need memory that not everybody has.
const MAX_SEQ_LEN: usize = 2048;

/// Learning rate of adapters, which begin at zero.
const LORA_LR: f64 = 2e-4;

/// The longest sequence of a run where no flag says, of this model if it is known.
pub(crate) fn default_seq_len(config: Option<&ModelConfig>) -> usize {
    config.map_or(MAX_SEQ_LEN, |config| config.max_seq_len().min(MAX_SEQ_LEN))
}

impl TrainingArgs {
    /// How this process takes part in the run, with `--dp` settled.
    ///
    /// # Errors
    /// As [`Self::run_config`].
    pub(crate) fn run_config_with_defaults(&mut self) -> Result<RunConfig> {
        if self.layout.dp.is_none() {
            let num_ranks = self.ranks.num_ranks()?;
            let num_servers = self.strategy.num_servers();
            let num_workers = num_ranks.saturating_sub(num_servers);
            self.layout.dp = Some(self.layout.replicas_of(num_workers));
            let env = RankEnv::from_env().map_err(candle_core::Error::wrap)?;
            let may_change = env.world_size() > 1 || env.num_restarts() > 0;
            self.batches.uneven = may_change && num_servers == 0;
        }
        self.run_config()
    }

    /// Takes what fits the ranks, and the checkpoint that is fine-tuned, if one is, where no flag says: what was taken, as flags.
    pub(crate) fn fill(
        &mut self,
        flags: &Flags,
        config: Option<&ModelConfig>,
        run: &RunConfig,
    ) -> Vec<String> {
        let mut taken = Vec::new();
        // A program's own model comes with its own defaults.
        let is_free = config.is_none() || flags.is_given("--model");
        let is_chosen = |name| is_free && !flags.is_given(name);
        if is_chosen("--dp") {
            taken.push(format!("--dp {}", self.layout.degrees().dp));
        }
        if config.is_some() && is_chosen("--seq-len") {
            let sequences = &mut self.batches.sequences;
            sequences.seq_len = default_seq_len(config);
            taken.push(format!("--seq-len {}", sequences.seq_len));
        }
        // --matmul-precision is about f32.
        let flags_of_type = ["--dtype", "--bf16", "--fp16", "--matmul-precision"];
        if flags_of_type.into_iter().all(is_chosen) && run.devices.iter().all(Device::is_cuda) {
            self.layout.dtype = DTypeChoice::Bf16;
            taken.push("--dtype bf16".to_string());
        }
        let batches = &mut self.batches;
        if let Some(size) = batches.per_device_train_batch_size {
            batches.micro_batch_size = size;
        }
        let unit = batches
            .micro_batch_size
            .saturating_mul(self.layout.degrees().dp);
        // There may be other replicas than when the run began.
        let is_restart = run.env.num_restarts() > 0;
        let noted = self
            .checkpoints
            .noted_setting(GLOBAL_BATCH_SIZE, is_restart);
        let noted = noted.filter(|_| is_restart && !flags.is_given(GLOBAL_BATCH_SIZE));
        if let Some(size) = noted.and_then(|size| size.parse().ok()) {
            batches.global_batch_size = size;
            taken.push(format!("{GLOBAL_BATCH_SIZE} {size}"));
        } else if let Some(steps) = batches.accumulation()
            && !flags.is_given(GLOBAL_BATCH_SIZE)
        {
            batches.global_batch_size = unit.saturating_mul(steps);
            taken.push(format!("{GLOBAL_BATCH_SIZE} {}", batches.global_batch_size));
        } else if is_chosen(GLOBAL_BATCH_SIZE) {
            batches.global_batch_size = batches.global_batch_size.next_multiple_of(unit);
            taken.push(format!("{GLOBAL_BATCH_SIZE} {}", batches.global_batch_size));
        }
        if config.is_some() && is_chosen("--lr") {
            if flags.is_given("--lora-rank") || flags.is_given("--adapter") {
                self.optimizer.lr = LORA_LR;
            }
            taken.push(format!("--lr {}", written(self.optimizer.lr)));
        }
        taken
    }
}

impl BatchArgs {
    /// Micro-batches of a replica in a step, where flags give a step by these and not by its size, unless that is given too.
    pub(crate) fn accumulation(&self) -> Option<usize> {
        let of_one = self.per_device_train_batch_size.map(|_| 1);
        self.gradient_accumulation_steps.or(of_one)
    }
}
