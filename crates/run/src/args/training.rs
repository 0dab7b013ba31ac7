//! Flags of a training run: layout, batches, optimizer.

use std::ops::Bound::{Excluded, Unbounded};

use std::path::{PathBuf, absolute};

use candle_comm::{Degrees, Mesh, RankEnv, RunConfig};
use candle_core::{Device, Error, Result, bail};
use candle_parallel::checkpoint::HfSave;
use candle_parallel::{
    AdamWConfig, DataParallel, ModelPart, Offload, ParamBuilder, ReduceType, ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use candle_trainer::{
    BatchConfig, BatchRamp, Batches, LossHistory, LossRange, LrDecay, LrSchedule, Samples,
    TrainConfig, counted, explain_out_of_memory,
};
use clap::Args;
use clap::builder::ArgPredicate;
use serde::Serialize;

use crate::args::checkpoints::CheckpointArgs;
use crate::args::choices::{
    DTypeChoice, LrScheduleChoice, Quantization, RecomputeChoice, ReduceChoice,
};
use crate::args::context::ContextArgs;
use crate::args::evaluation::EvalArgs;
use crate::args::freeze::FreezeArgs;
use crate::args::logs::LogArgs;
use crate::args::loss_scale::LossScaleArgs;
use crate::args::number::{real, whole};
use crate::args::output::OutputArgs;
use crate::args::pipeline::PipelineArgs;
use crate::args::ranks::RankArgs;
use crate::args::sequences::SequenceArgs;
use crate::args::strategy::StrategyArgs;
use crate::args::text::some_text;
use crate::flags::default_of;
use crate::idle::Idle;

/// Sequences of a step where nothing says.
const GLOBAL_BATCH_SIZE: usize = 16;
/// Learning rate where nothing says.
const LR: f64 = 2e-5;
/// Part of the steps in which the rate of a WSD schedule falls.
const WSD_DECAY_RATIO: f64 = 0.2;

/// Everything about a run but its model and its data.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TrainingArgs {
    /// How many sequences at a time, and for how long.
    #[command(flatten, next_help_heading = "Batches")]
    pub batches: BatchArgs,
    /// How weights change.
    #[command(flatten, next_help_heading = "Optimizer")]
    pub optimizer: OptimizerArgs,
    /// Loss on samples that are not trained on.
    #[command(flatten, next_help_heading = "Evaluation")]
    pub evaluation: EvalArgs,
    /// Saving the run while it goes on.
    #[command(flatten, next_help_heading = "Checkpoints")]
    pub checkpoints: CheckpointArgs,
    /// What is written of the steps.
    #[command(flatten, next_help_heading = "Output")]
    pub logs: LogArgs,
    /// Where the trained model goes.
    #[command(flatten, next_help_heading = "Output")]
    pub output: OutputArgs,
    /// How the model lies on the ranks.
    #[command(flatten, next_help_heading = "Layout")]
    pub layout: LayoutArgs,
    /// How ranks share the work.
    #[command(flatten, next_help_heading = "Layout")]
    pub strategy: StrategyArgs,
    /// What ranks are, and how long they wait for one another.
    #[command(flatten, next_help_heading = "Ranks")]
    pub ranks: RankArgs,
}

impl Default for TrainingArgs {
    fn default() -> Self {
        default_of()
    }
}

/// How the model lies on the ranks.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LayoutArgs {
    /// Tensor-parallel degree: ranks that share each layer
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub tp: usize,
    /// Pipeline-parallel degree: ranks that have the layers one after the other, in one or several stages each
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub pp: usize,
    /// Data-parallel degree: replicas that share each global batch [default: what the ranks leave after --tp, --pp and --cp]
    ///
    /// Ranks are the processes of a launcher, or one for each GPU of this machine; without either there is one.
    #[arg(long, value_name = "REPLICAS", value_parser = whole::<usize>(1..))]
    pub dp: Option<usize>,
    /// ZeRO stage, what replicas divide between them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too
    #[arg(long, default_value_t = 1, value_parser = whole::<u8>(0..=3))]
    pub zero: u8,
    /// Divide it within groups of so many replicas, which hold the same; they move less, and hold more [default: all replicas]
    #[arg(long, value_name = "REPLICAS", value_parser = whole::<usize>(2..))]
    pub zero_group: Option<usize>,
    /// Type in which gradients move between replicas
    #[arg(long, ignore_case = true, default_value = "f32")]
    pub grad_reduce_dtype: ReduceChoice,
    /// Move gradients between replicas in 8 bits, blocks of 256 values with a scale each; needs --zero 1, 2 or 3 [default: no]
    #[arg(long, value_name = "TYPE", conflicts_with = "grad_reduce_dtype")]
    pub quantize_gradients: Option<Quantization>,
    /// Gather weights in 8 bits, blocks of 256 values with a scale each; needs --zero 3 [default: no]
    #[arg(long, value_name = "TYPE")]
    pub quantize_weights: Option<Quantization>,
    /// Gather the weight of a linear layer, of the embedding and of the head in TILES tiles of rows, one after the other, each freed
    /// after its use; more than 1 needs --zero 3
    #[arg(long, default_value_t = 1, value_name = "TILES", value_parser = whole::<usize>(1..))]
    pub tile_linears: usize,
    /// Communicate between replicas only while nothing is computed; slower, and the same bits
    #[arg(long)]
    pub no_overlap: bool,
    /// The stages of a pipeline and their order.
    #[command(flatten)]
    #[serde(flatten)]
    pub pipeline: PipelineArgs,
    /// How sequences are divided.
    #[command(flatten)]
    #[serde(flatten)]
    pub context: ContextArgs,
    /// What to compute again in the backward pass instead of keeping it: less memory, the same bits
    #[arg(long, default_value = "none")]
    pub recompute: RecomputeChoice,
    /// Type of weights and activations while training [default: bf16 on GPUs without --matmul-precision, else f32]
    #[arg(long, ignore_case = true, default_value_ifs = [
        ("bf16", ArgPredicate::IsPresent, "bf16"),
        ("fp16", ArgPredicate::IsPresent, "f16"),
    ])]
    pub dtype: Option<DTypeChoice>,
    /// The same as --dtype bf16
    #[arg(long, conflicts_with_all = ["dtype", "fp16"])]
    #[serde(skip)]
    pub bf16: bool,
    /// The same as --dtype f16
    #[arg(long, conflicts_with = "dtype")]
    #[serde(skip)]
    pub fp16: bool,
    /// Keep the optimizer's state and masters in the host's memory (optimizer), or in a file of a folder, for each rank one that is
    /// gone after the run (nvme:DIR); the same bits [default: where the weights are]
    #[arg(long, value_name = "optimizer|nvme:DIR")]
    #[serde(serialize_with = "some_text")]
    pub offload: Option<Offload>,
}

impl Default for LayoutArgs {
    fn default() -> Self {
        default_of()
    }
}

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

impl Default for BatchArgs {
    fn default() -> Self {
        default_of()
    }
}

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

impl Default for OptimizerArgs {
    fn default() -> Self {
        default_of()
    }
}

impl LayoutArgs {
    /// Type of weights and activations; where nothing was chosen yet f32.
    pub fn dtype(&self) -> DTypeChoice {
        self.dtype.unwrap_or(DTypeChoice::F32)
    }

    /// How data-parallel replicas work together.
    pub fn data_parallel(&self) -> DataParallel {
        DataParallel {
            zero: match self.zero {
                0 => ZeroStage::Zero,
                1 => ZeroStage::One,
                2 => ZeroStage::Two,
                _ => ZeroStage::Three,
            },
            zero_group: self.zero_group,
            reduce: match self.quantize_gradients {
                Some(_) => ReduceType::Int8,
                None => self.grad_reduce_dtype.into(),
            },
            quantize_weights: self.quantize_weights.is_some(),
            tile_linears: self.tile_linears,
            overlap: !self.no_overlap,
        }
    }

    /// An error if the model cannot be divided over the ranks, or a step over its micro-batches.
    ///
    /// # Errors
    /// See above, with the numbers.
    pub fn check_model(
        &self,
        config: &ModelConfig,
        batches: &BatchConfig,
        seq_len: usize,
    ) -> Result<()> {
        let degrees = self.degrees();
        CausalLm::check_degrees(config, &Degrees { pp: 1, ..degrees })?;
        self.context.check(config, degrees.tp, seq_len)?;
        let plan_of = |size: usize| {
            let per_replica = size.div_ceil(degrees.dp);
            let num_micro_batches = per_replica.div_ceil(batches.micro_batch_size);
            let plan = self
                .pipeline
                .plan(degrees.pp, config, seq_len, num_micro_batches);
            plan.map(drop)
        };
        plan_of(batches.global_batch_size)?;
        batches.ramp.map_or(Ok(()), |ramp| {
            let of_start =
                |err: Error| err.context(format!("the first steps of --batch-ramp {ramp}"));
            plan_of(ramp.start).map_err(of_start)
        })
    }

    /// A rank's part of a model that is trained on sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// As for [`Self::check_model`], and weights that do not fit the model or the memory.
    pub fn part(
        &self,
        config: &ModelConfig,
        mesh: &Mesh,
        vb: &ParamBuilder,
        seq_len: usize,
    ) -> Result<ModelPart> {
        let layout = self.pipeline.layout(mesh.degrees.pp, config, seq_len)?;
        let parts = PartConfig {
            layout: Some(layout),
            context: self.context.config(),
            sequence_parallel: self.context.sequence_parallel,
        };
        let part = CausalLm::part_with(config, mesh, vb, parts)
            .map_err(|err| explain_out_of_memory(err, mesh.world.device()))?;
        Ok(part.with_recompute(|_| self.recompute.into()))
    }

    /// How many replicas so many ranks make.
    pub(crate) fn replicas_of(&self, num_ranks: usize) -> usize {
        let of_replica = [self.tp, self.context.cp].into_iter();
        (num_ranks / of_replica.fold(self.pp, usize::saturating_mul)).max(1)
    }

    /// The mesh's degrees; without `--dp` as many replicas as a launcher's processes make.
    pub fn degrees(&self) -> Degrees {
        let dp = self.dp.unwrap_or_else(|| {
            // What is wrong with the environment [`RankArgs::config`] says.
            let num_processes = RankEnv::from_env().map_or(1, |env| env.world_size());
            self.replicas_of(num_processes)
        });
        Degrees {
            pp: self.pp,
            dp,
            cp: self.context.cp,
            tp: self.tp,
        }
    }
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
    fn warmup_steps(&self, num_steps: f64) -> usize {
        let steps = (self.warmup_ratio * num_steps).ceil();
        // The whole of a run that ends in its batch ramp would be a part of a step.
        let is_all = steps >= num_steps && num_steps.fract() != 0.0;
        let steps = if is_all { 0.0 } else { steps };
        self.warmup_steps.unwrap_or(steps as usize)
    }

    fn decay(&self) -> LrDecay {
        match self.lr_schedule {
            LrScheduleChoice::Cosine => LrDecay::Cosine,
            LrScheduleChoice::Linear => LrDecay::Linear,
            LrScheduleChoice::Constant => LrDecay::Constant,
            LrScheduleChoice::Wsd => LrDecay::Wsd(self.lr_decay_ratio.unwrap_or(WSD_DECAY_RATIO)),
        }
    }
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
    fn size_in_words(&self) -> String {
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

impl TrainingArgs {
    /// Without what may differ between ranks.
    pub(crate) fn shared(&self) -> Self {
        let mut shared = self.clone();
        shared.evaluation.eval_data = Vec::new();
        shared.logs.metrics = None;
        shared.logs.tensorboard = None;
        shared.ranks.device = None;
        shared
    }

    /// Without what is over when a run is done again.
    pub(crate) fn to_repeat(&self) -> Self {
        let mut again = self.clone();
        again.checkpoints = CheckpointArgs::default();
        // Other ways to say --micro-batch-size and --global-batch-size, which are known.
        again.batches.per_device_train_batch_size = None;
        if again.batches.global_batch_size.is_some() {
            again.batches.gradient_accumulation_steps = None;
        }
        again.logs.metrics = None;
        again.output.overwrite = false;
        again.output.rescue_dir = None;
        again
    }

    /// Flags that would do nothing.
    pub(crate) fn idle(&self) -> Vec<Idle> {
        let (optimizer, default) = (&self.optimizer, OptimizerArgs::default());
        let is_constant = matches!(optimizer.lr_schedule, LrScheduleChoice::Constant);
        let is_wsd = matches!(optimizer.lr_schedule, LrScheduleChoice::Wsd);
        let is_narrow = self.layout.dtype() != DTypeChoice::F32;
        let keeps = self.checkpoints.keep != CheckpointArgs::default().keep;
        let mut idle = Idle::of([
            (
                is_constant && optimizer.min_lr_ratio != default.min_lr_ratio,
                "min-lr-ratio",
                &["lr-schedule"],
                "beside --lr-schedule constant, whose rate does not fall",
            ),
            (
                !is_wsd && optimizer.lr_decay_ratio.is_some(),
                "lr-decay-ratio",
                &["lr-schedule"],
                "without --lr-schedule wsd, whose it is",
            ),
            (
                is_narrow && self.ranks.matmul_precision.is_some(),
                "matmul-precision",
                &["dtype", "bf16", "fp16"],
                "beside --dtype bf16 or f16, and is about products of f32",
            ),
            (
                self.checkpoints.save_dir.is_none() && keeps,
                "keep",
                &["save-dir"],
                "without --save-dir, the folder of the checkpoints",
            ),
        ]);
        idle.extend(self.batches.sequences.idle());
        idle.extend(self.strategy.idle(&self.layout));
        idle
    }

    /// How data-parallel replicas work together. Servers are replicas that divide everything.
    pub(crate) fn data_parallel(&self) -> DataParallel {
        match self.strategy.num_servers() {
            0 => self.layout.data_parallel(),
            _ => DataParallel {
                zero: ZeroStage::Three,
                ..self.layout.data_parallel()
            },
        }
    }

    /// How this process takes part in the run.
    pub(crate) fn run_config(&self) -> Result<RunConfig> {
        let (degrees, strategy) = (self.layout.degrees(), &self.strategy);
        strategy.check(&degrees)?;
        let num_replicas = degrees.dp.saturating_mul(degrees.cp);
        self.data_parallel().validate(num_replicas)?;
        match strategy.num_servers() {
            0 => self.ranks.config(degrees),
            num_servers => self.ranks.config_of_mailboxes(degrees, num_servers),
        }
    }

    /// An error if flags contradict each other, whatever the model and the data are.
    pub(crate) fn validate(&self) -> Result<()> {
        let output = self.output.output.as_path();
        self.checkpoints.validate(output)?;
        self.logs.check_places(&absolute(output)?)?;
        if let Some(num_steps) = self.batches.steps {
            self.logs.trace.check_steps(num_steps)?;
        }
        self.evaluation.validate()
    }

    /// An error if the folders of the run cannot be its own: for the first rank, before anything takes long. `inputs` are files and folders that
    /// the run reads.
    pub(crate) fn check_folders(&self, inputs: Vec<PathBuf>, run: &RunConfig) -> Result<()> {
        if !run.is_first() {
            return Ok(());
        }
        let save = self.output.hf_save(None, Vec::new());
        HfSave { inputs, ..save }.check_place()?;
        match run.env.num_restarts() {
            0 => self.checkpoints.check_folders(),
            _ => Ok(()),
        }
    }

    /// The same of flags that [`Self::fill`] may give their values.
    pub(crate) fn validate_filled(&self) -> Result<()> {
        let (batches, dp) = (&self.batches, self.layout.degrees().dp);
        let seq_len = batches.sequences.seq_len();
        batches.config().validate(seq_len, dp)?;
        let loss_scale = self.optimizer.loss_scale;
        loss_scale.config(self.layout.dtype()).map(drop)
    }

    /// An error if the model cannot be divided over the ranks, or does not take sequences of this length; `longer` says what else
    /// there is to do then.
    pub(crate) fn check_model(&self, config: &ModelConfig, longer: &str) -> Result<()> {
        self.layout.check_model(
            config,
            &self.batches.config(),
            self.batches.sequences.seq_len(),
        )?;
        let (seq_len, max) = (self.batches.sequences.seq_len(), config.max_seq_len());
        if seq_len > max {
            bail!(
                "--seq-len {seq_len} is longer than the {max} tokens that the model's max_position_embeddings and rope_type allow\nhint: --seq-len {max} at most{longer}"
            );
        }
        Ok(())
    }

    /// The run in one line.
    pub(crate) fn describe(&self, samples: &Samples, num_steps: usize, run: &RunConfig) -> String {
        let Degrees { pp, dp, cp, tp } = self.layout.degrees();
        let divided = match cp {
            1 => format!("pp {pp} x dp {dp} x tp {tp}"),
            _ => format!("pp {pp} x dp {dp} x cp {cp} x tp {tp}"),
        };
        let strategy = &self.strategy;
        let num_servers = strategy.num_servers();
        let layout = match num_servers {
            0 if dp * cp == 1 => divided,
            0 => format!("{divided}, ZeRO-{}", self.layout.zero),
            _ => format!(
                "{} and {}, {}",
                counted(num_servers, "server"),
                counted(dp, "worker"),
                match strategy.is_async {
                    false => "synchronous".to_string(),
                    true => format!(
                        "asynchronous with a staleness of at most {}",
                        strategy.max_staleness
                    ),
                }
            ),
        };
        format!(
            "{}, {} of {} of {}; {} {}: {layout}",
            samples.summary(),
            counted(num_steps, "step"),
            self.batches.size_in_words(),
            counted(samples.config().seq_len, "token"),
            counted(pp * dp * cp * tp + num_servers, "rank"),
            run.describe(),
        )
    }

    /// The batches of replica `dp_rank`.
    pub(crate) fn training_batches(&self, samples: &Samples, dp_rank: usize) -> Result<Batches> {
        let (config, dp) = (self.batches.config(), self.layout.degrees().dp);
        Batches::new(samples, config, dp_rank, dp, &Device::Cpu)
    }

    /// The optimizer's and the trainer's configuration for a run over these samples; checks everything it can.
    pub(crate) fn train_config(&self, samples: &Samples) -> Result<TrainConfig> {
        let (layout, args) = (&self.layout, &self.optimizer);
        let batches = self.training_batches(samples, 0)?;
        let num_steps = match self.batches.steps {
            Some(num_steps) => num_steps,
            None => batches.first_step_from(self.batches.end_of_epochs(batches.num_samples()))?,
        };
        let mut lr_schedule = LrSchedule {
            lr: args.lr(),
            min_lr_ratio: args.min_lr_ratio,
            warmup_steps: 0,
            num_steps,
            decay: args.decay(),
            ramp: batches.ramp_progress(),
        };
        let num_full_steps = lr_schedule.progress(num_steps);
        lr_schedule.warmup_steps = args.warmup_steps(num_full_steps);
        let config = TrainConfig {
            lr_schedule,
            adamw: AdamWConfig {
                beta1: args.adam_beta1,
                beta2: args.adam_beta2,
                eps: args.adam_eps,
                weight_decay: args.weight_decay,
            },
            max_grad_norm: Some(args.max_grad_norm).filter(|norm| *norm > 0.0),
            loss_scaling: args.loss_scale.config(layout.dtype())?,
            offload: layout.offload.clone().unwrap_or_default(),
            schedule: layout.pipeline.order.schedule.into(),
            pipeline_prefetch: layout.pipeline.pipeline_prefetch,
        };
        config.validate()?;
        Ok(config)
    }
}
