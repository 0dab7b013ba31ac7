//! What a run takes where nothing says: fit for the model and the machine.

use std::fmt;

use candle_comm::{RankEnv, RunConfig};
use candle_core::{DType, Result};
use candle_train_models::ModelConfig;

use crate::args::batches::BatchArgs;
use crate::args::number::written;
use crate::args::sequences::default_seq_len;
use crate::args::training::TrainingArgs;
use crate::record::GLOBAL_BATCH_SIZE;

/// Learning rate of adapters, which begin at zero.
const LORA_LR: f64 = 2e-4;

/// A value that was taken where no flag says.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    /// The flag, with its dashes.
    pub flag: &'static str,
    pub value: String,
    /// Why this one.
    pub reason: String,
}

impl Taken {
    pub fn new(flag: &'static str, value: impl ToString, reason: impl ToString) -> Self {
        Self {
            flag,
            value: value.to_string(),
            reason: reason.to_string(),
        }
    }
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.flag, self.value)
    }
}

impl TrainingArgs {
    /// How this process takes part in the run; without `--dp`, replicas may come and go.
    ///
    /// # Errors
    /// As [`Self::run_config`].
    pub(crate) fn run_config_with_defaults(&mut self) -> Result<RunConfig> {
        if self.layout.dp.is_none() {
            self.fill_replicas(self.ranks.num_ranks()?);
            let env = RankEnv::from_env().map_err(candle_core::Error::wrap)?;
            let may_change = env.world_size() > 1 || env.num_restarts() > 0;
            self.batches.uneven = may_change && self.strategy.num_servers() == 0;
        }
        self.run_config()
    }

    /// Takes as many replicas as so many ranks make, where no flag says.
    pub(crate) fn fill_replicas(&mut self, num_ranks: usize) {
        if self.layout.dp.is_none() {
            let num_workers = num_ranks.saturating_sub(self.strategy.num_servers());
            self.layout.dp = Some(self.layout.replicas_of(num_workers));
            self.batches.may_change = true;
        }
    }

    /// Takes what fits the ranks and the model where no flag says, adapters of which are trained or not: what was taken. Of a run that
    /// `is_restart`, a step is as large as before.
    pub(crate) fn fill(
        &mut self,
        config: &ModelConfig,
        has_adapters: bool,
        on_gpus: bool,
        is_restart: bool,
    ) -> Vec<Taken> {
        let mut taken = Vec::new();
        if self.batches.may_change {
            let dp = self.layout.degrees().dp;
            taken.push(Taken::new(
                "--dp",
                dp,
                "what the ranks leave after --tp, --pp and --cp",
            ));
        }
        let sequences = &mut self.batches.sequences;
        if sequences.seq_len.is_none() {
            let seq_len = *sequences.seq_len.insert(default_seq_len(Some(config)));
            taken.push(Taken::new(
                "--seq-len",
                seq_len,
                "as long as the model takes, up to 2048",
            ));
        }
        // --matmul-precision is about f32.
        let is_free = self.layout.dtype.is_none() && self.ranks.matmul_precision.is_none();
        if is_free && on_gpus {
            self.layout.dtype = Some(DType::BF16);
            taken.push(Taken::new("--dtype", "bf16", "on GPUs"));
        }
        let batches = &mut self.batches;
        if let Some(size) = batches.per_device_train_batch_size {
            batches.micro_batch_size = size;
        }
        if batches.global_batch_size.is_none() {
            let unit = batches
                .micro_batch_size
                .saturating_mul(self.layout.degrees().dp);
            // There may be other replicas than when the run began.
            let checkpoints = &self.checkpoints;
            let noted = is_restart.then(|| checkpoints.noted_setting(GLOBAL_BATCH_SIZE, true));
            let noted = noted.flatten().and_then(|size| size.parse().ok());
            let (size, reason) = match (noted, batches.accumulation()) {
                (Some(size), _) => (size, "as before the ranks were started again"),
                (None, Some(steps)) => (
                    unit.saturating_mul(steps),
                    "micro-batches of all replicas, times --gradient-accumulation-steps",
                ),
                (None, None) => (
                    batches.global_batch_size().next_multiple_of(unit),
                    "16, or more for whole micro-batches of all replicas",
                ),
            };
            batches.global_batch_size = Some(size);
            taken.push(Taken::new(GLOBAL_BATCH_SIZE, size, reason));
        }
        let num_micro_batches = self
            .batches
            .global_batch_size()
            .div_ceil((self.batches.micro_batch_size).saturating_mul(self.layout.degrees().dp));
        // A worker of servers cannot send the gradients of several stages.
        let has_servers = self.strategy.num_servers() > 0;
        if !has_servers && (self.layout).fill_schedule(config, num_micro_batches) {
            let pipeline = &self.layout.pipeline;
            let (schedule, stages) = (pipeline.order.schedule(), pipeline.order.virtual_stages);
            let reason = "a step reads weights in files twice, however many micro-batches it has";
            taken.push(Taken::new("--schedule", schedule.name(), reason));
            let of_each = "a block to a stage";
            let stages = stages.unwrap_or_default();
            taken.push(Taken::new("--virtual-stages", stages, of_each));
            let layers = &pipeline.pipeline_layout;
            taken.push(Taken::new("--pipeline-layout", layers, of_each));
        }
        if self.optimizer.lr.is_none() {
            let (lr, reason) = match has_adapters {
                true => (LORA_LR, "of adapters"),
                false => (self.optimizer.lr(), "of all weights"),
            };
            self.optimizer.lr = Some(lr);
            taken.push(Taken::new("--lr", written(lr), reason));
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
