//! Flags of a training run: layout, batches, optimizer.

use std::path::{PathBuf, absolute};

use candle_comm::{Degrees, RunConfig};
use candle_core::{DType, Device, Result, bail};
use candle_parallel::checkpoint::HfSave;
use candle_parallel::{AdamWConfig, DataParallel, ZeroStage};
use candle_train_models::ModelConfig;
use candle_trainer::{Batches, LrSchedule, Samples, TrainConfig, counted};
use clap::Args;
use serde::Serialize;

use crate::args::batches::BatchArgs;
use crate::args::checkpoints::CheckpointArgs;
use crate::args::choices::LrScheduleChoice;
use crate::args::evaluation::EvalArgs;
use crate::args::layout::LayoutArgs;
use crate::args::logs::LogArgs;
use crate::args::optimizer::OptimizerArgs;
use crate::args::output::OutputArgs;
use crate::args::ranks::RankArgs;
use crate::args::strategy::StrategyArgs;
use crate::flags::idle::Idle;

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
        again.logs = LogArgs::default();
        again.output.overwrite = false;
        again.output.export_gguf = None;
        again.output.rescue_dir = None;
        again
    }

    /// Flags that would do nothing.
    pub(crate) fn idle(&self) -> Vec<Idle> {
        let (optimizer, default) = (&self.optimizer, OptimizerArgs::default());
        let is_constant = matches!(optimizer.lr_schedule, LrScheduleChoice::Constant);
        let is_wsd = matches!(optimizer.lr_schedule, LrScheduleChoice::Wsd);
        let is_narrow = self.layout.dtype() != DType::F32;
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
        self.check_replicas()?;
        match strategy.num_servers() {
            0 => self.ranks.config(degrees),
            num_servers => self.ranks.config_of_mailboxes(degrees, num_servers),
        }
    }

    /// An error if the degrees do not fit the strategy, or what replicas divide.
    fn check_replicas(&self) -> Result<()> {
        let degrees = self.layout.degrees();
        self.strategy.check(&degrees)?;
        let num_replicas = degrees.dp.saturating_mul(degrees.cp);
        self.data_parallel().validate(num_replicas)
    }

    /// An error if flags contradict each other, whatever the model and the data are.
    pub(crate) fn validate(&self) -> Result<()> {
        let output = self.output.output.as_path();
        self.checkpoints.validate(output)?;
        self.layout.check_offload()?;
        // What does not go together on any device.
        (self.layout.offload()).validate(&self.data_parallel(), true)?;
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
        self.check_replicas()?;
        let (batches, dp) = (&self.batches, self.layout.degrees().dp);
        let seq_len = batches.sequences.seq_len();
        batches.config().validate(seq_len, dp)?;
        self.train_config_of(0, Vec::new()).map(drop)
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

    /// The run in one line, as far as its data is known.
    pub(crate) fn describe(
        &self,
        samples: Option<&Samples>,
        num_steps: Option<usize>,
        run: &RunConfig,
    ) -> String {
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
        let samples = samples.map_or(String::new(), |samples| samples.summary() + ", ");
        let steps = num_steps.map_or("steps".to_string(), |steps| counted(steps, "step"));
        format!(
            "{samples}{steps} of {} of {}; {} {}: {layout}",
            self.batches.size_in_words(),
            counted(self.batches.sequences.seq_len(), "token"),
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
        let batches = self.training_batches(samples, 0)?;
        let num_steps = match self.batches.steps {
            Some(num_steps) => num_steps,
            None => batches.first_step_from(self.batches.end_of_epochs(batches.num_samples()))?,
        };
        self.train_config_of(num_steps, batches.ramp_progress())
    }

    /// The same for so many steps, of which `ramp` says what those of a batch ramp count as.
    fn train_config_of(&self, num_steps: usize, ramp: Vec<f64>) -> Result<TrainConfig> {
        let (layout, args) = (&self.layout, &self.optimizer);
        let mut lr_schedule = LrSchedule {
            lr: args.lr(),
            min_lr_ratio: args.min_lr_ratio,
            warmup_steps: 0,
            num_steps,
            decay: args.decay(),
            ramp,
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
            schedule: layout.pipeline.order.schedule(),
            pipeline_prefetch: layout.pipeline.pipeline_prefetch,
        };
        config.validate()?;
        Ok(config)
    }
}
