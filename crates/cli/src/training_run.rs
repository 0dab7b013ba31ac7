//! A run: data and model in, training with its progress, metrics and samples, a checkpoint out.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_comm::{Mesh, ProcessGroup, RunConfig, launch, message_of};
use candle_core::{DType, Device, Result};
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, SaveOutcome, TrainingCheckpoint};
use candle_train::{
    Batches, Checkpoints, DataPosition, Metrics, Progress, Tokenizer, Tokens, TrainConfig, Trainer,
    TrainingRecord, explain_out_of_memory, peaks_in_words,
};
use candle_train_models::{CausalLm, ModelConfig};

use crate::config_dtype::with_config_dtype;
use crate::fingerprint::fingerprint;
use crate::flags::Flags;
use crate::lora_args::{LoraArgs, print_trained};
use crate::output::print_line;
use crate::samples::SampleArgs;
use crate::stop::{Stop, Stopped};
use crate::training_args::TrainingArgs;

/// Everything that the ranks of this process need, read once.
pub(crate) struct TrainingRun<'a> {
    pub training: &'a TrainingArgs,
    pub samples: &'a SampleArgs,
    /// What may stop it; the time counts since the program began.
    pub stop: Stop,
    pub config: ModelConfig,
    pub initial_weights: InitialWeights,
    /// What is trained beside these.
    pub lora: LoraArgs,
    /// The model that is trained, as its user calls it.
    pub base_model: Option<&'a str>,
    pub tokenizer: Tokenizer,
    pub tokens: Tokens,
    /// What is trained on what, in words.
    pub title: String,
    /// Files and folders that are read.
    pub inputs: Vec<PathBuf>,
    /// Folder of the trained checkpoint.
    pub output: &'a Path,
    /// Files beside its weights.
    pub sidecars: Vec<(String, Vec<u8>)>,
    /// Type of its weights, if not each tensor's own.
    pub save_dtype: Option<DType>,
}

/// Where a run begins.
pub(crate) enum InitialWeights {
    Random,
    /// A folder.
    Checkpoint(PathBuf),
}

/// Files that tell what a model is, and not what an adapter is.
const OF_THE_MODEL: [&str; 3] = ["config.json", "generation_config.json", "README.md"];

/// What a run goes on from.
struct Resumed {
    checkpoint: TrainingCheckpoint,
    /// The place of its next step in the data.
    position: DataPosition,
}

impl TrainingRun<'_> {
    /// Checks what can be checked, trains and saves.
    pub(crate) fn run(self, mut ranks: RunConfig, flags: Flags) -> Result<ExitCode> {
        let tokenizer = &self.tokenizer;
        tokenizer.check_vocab(self.tokens.ids(), self.config.vocab_size)?;
        let train = self.training.train_config(&self.tokens)?;
        self.training.checkpoints.validate(self.output)?;
        self.samples.check(tokenizer, &self.config)?;
        self.lora.check()?;
        let model = match &self.initial_weights {
            InitialWeights::Random => None,
            InitialWeights::Checkpoint(model) => Some(model.as_path()),
        };
        let config = self.sidecars.iter().find(|(name, _)| name == "config.json");
        let config = config.map(|(_, content)| content.as_slice());
        let mut record = self.training.record(&train, &self.tokens, config, model)?;
        self.lora.add_to(&mut record)?;
        let mut sidecars = with_config_dtype(self.sidecars.clone(), self.save_dtype)?;
        if self.lora.is_given() {
            // What describes the model is in the model's folder.
            sidecars.retain(|(name, _)| !OF_THE_MODEL.contains(&name.as_str()));
        }
        let beside = self.training.checkpoints.save_dir.as_deref();
        let save = HfSave {
            dtype: self.save_dtype,
            run: Some(self.training.run_digest(&record, self.save_dtype)?),
            inputs: self.inputs.clone(),
            ..self.training.save.hf_save((self.output, beside), sidecars)
        };
        // No other run writes there until this one ends.
        let claimed = ranks.is_first().then(|| save.check_output()).transpose()?;
        if let Some(claimed) = &claimed {
            self.training.check_metrics(claimed.place())?;
            let num_steps = train.lr_schedule.num_steps;
            let run = self.training.describe(&self.tokens, num_steps, &ranks);
            print_line(&format!("{}: {run}", self.title));
        }
        let folders = [
            ("--model", model),
            ("--adapter", self.lora.adapter.as_deref()),
        ];
        ranks.fingerprint = fingerprint(&ranks, flags, &self.tokens, &folders)?;
        let stopped = launch::run(&ranks, |world| {
            self.run_rank(&train, (&save, &record, &self.stop), world)
        })?;
        let stopped = stopped.into_iter().next().flatten();
        if ranks.is_first() {
            let checkpoint = stopped.as_ref().and_then(|it| it.checkpoint.as_deref());
            let saved = checkpoint.unwrap_or(self.output);
            print_line(&format!("saved to {}", saved.display()));
            if let Some(stopped) = &stopped {
                let num_steps = train.lr_schedule.num_steps;
                let is_alone = ranks.env.world_size() == 1;
                let place = (self.output, is_alone);
                print_line(&self.stop.describe(stopped, num_steps, place));
            }
        }
        Ok(match stopped {
            Some(_) => self.stop.exit_code(),
            None => ExitCode::SUCCESS,
        })
    }

    /// One rank's part; how it was stopped, if it was.
    fn run_rank(
        &self,
        train: &TrainConfig,
        (save, record, stop): (&HfSave, &TrainingRecord, &Stop),
        world: ProcessGroup,
    ) -> Result<Option<Stopped>> {
        let training = self.training;
        let mesh = Mesh::new(world, training.layout.degrees())?;
        let resumed = self.resumed(record, &mesh.world)?;
        let saver = training
            .checkpoints
            .saver(&mesh.world, resumed.as_ref().map(|it| &it.checkpoint))?;
        let store = match &self.initial_weights {
            InitialWeights::Random => ParamStore::init(training.batches.seed),
            InitialWeights::Checkpoint(model) => ParamStore::from_pretrained(model)?,
        };
        let store = store.with_data_parallel(training.layout.data_parallel());
        let store = training.optimizer.freeze.apply(store);
        let seed = training.batches.seed;
        let store = self.lora.apply(store, seed, self.base_model)?;
        let vb = store.builder(training.layout.dtype.into(), mesh.world.device());
        let stage = CausalLm::stage(&self.config, &mesh, &vb)
            .map_err(|err| explain_out_of_memory(err, mesh.world.device()))?;
        let stage = stage.with_recompute(|_| training.layout.recompute.into());
        training.optimizer.freeze.check(stage.params())?;
        let is_first = mesh.world.rank() == 0;
        let last_title = match &self.initial_weights {
            InitialWeights::Random => {
                if is_first {
                    let num_values = stage.params().num_global_values();
                    print_line(&format!("{num_values} parameters"));
                }
                "sample"
            }
            InitialWeights::Checkpoint(_) => {
                if is_first {
                    print_trained(stage.params());
                }
                if resumed.is_none() {
                    self.print_sample("before", &mesh, &stage)?;
                }
                "after"
            }
        };
        let mut trainer = Trainer::new(train.clone(), &mesh, stage)?;
        if let Some(resumed) = &resumed {
            trainer.resume(&resumed.checkpoint)?;
        }
        if let Some((saver, every)) = saver {
            let checkpoints = Checkpoints::new(saver, every, record.clone(), is_first);
            trainer = trainer.with_checkpoints(checkpoints);
        }
        if is_first {
            trainer.check_space(save)?;
        }
        let mut trainer = trainer.with_stop(stop.asks());
        // The checkpoint's files are mapped as long as it lives.
        let position = resumed.map(|resumed| resumed.position);
        let batches = self.fit(&mut trainer, &mesh, position)?;
        if trainer.is_stopped() {
            return Self::stopped(&mut trainer, &batches, save).map(Some);
        }
        self.print_sample(last_title, &mesh, trainer.stage())?;
        trainer.save_hf(save)?;
        Ok(None)
    }

    /// Leaves what a run that was stopped can be gone on with: a checkpoint, or without those the model.
    fn stopped(trainer: &mut Trainer, batches: &Batches, save: &HfSave) -> Result<Stopped> {
        let step = trainer.step();
        let checkpoint = match trainer.save_checkpoint(batches)? {
            Some(SaveOutcome {
                saved: Ok(path), ..
            }) => Some(path),
            // Why has been told.
            Some(_) | None => {
                let steps = Some(step);
                trainer.save_hf(&HfSave {
                    steps,
                    ..save.clone()
                })?;
                None
            }
        };
        Ok(Stopped { step, checkpoint })
    }

    /// What the run goes on from, if it does, and if its data and settings allow it. Every rank must call it.
    fn resumed(&self, record: &TrainingRecord, world: &ProcessGroup) -> Result<Option<Resumed>> {
        let args = &self.training.checkpoints;
        let is_first = world.rank() == 0;
        let Some(checkpoint) = args.open(world)? else {
            if let (Some(_), Some(dir), true) = (&args.resume, &args.save_dir, is_first) {
                print_line(&format!(
                    "no checkpoint in {}: the run begins",
                    dir.display()
                ));
            }
            return Ok(None);
        };
        let earlier = TrainingRecord::of(&checkpoint)?;
        let changed = record.check(&earlier, args.resume_anyway)?;
        for change in changed.iter().filter(|_| is_first) {
            eprintln!("warning: {change}");
        }
        if is_first {
            let (dir, step) = (checkpoint.dir().display(), checkpoint.step());
            print_line(&format!("resumed after step {step} from {dir}"));
        }
        Ok(Some(Resumed {
            position: earlier.position,
            checkpoint,
        }))
    }

    /// Trains; the first rank shows progress and writes metrics. What it trained on.
    fn fit(
        &self,
        trainer: &mut Trainer,
        mesh: &Mesh,
        position: Option<DataPosition>,
    ) -> Result<Batches> {
        let (dp_rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
        let batch_config = self.training.batches.config();
        let mut batches = Batches::new(&self.tokens, batch_config, dp_rank, dp, &Device::Cpu)?;
        if let Some(position) = &position {
            batches = batches.continued(trainer.step(), position.total);
        }
        let is_first = mesh.world.rank() == 0;
        let metrics = self.training.metrics.as_ref().filter(|_| is_first);
        let metrics = metrics.map(|path| match &position {
            Some(_) => Metrics::resume(path, trainer.step()),
            None => Metrics::create(path),
        });
        let mut metrics = metrics.transpose()?;
        let mut progress = is_first.then(|| Progress::new(trainer.num_steps()));
        trainer.train(&batches, |step| {
            let logged = metrics.as_mut().map_or(Ok(()), |metrics| metrics.log(step));
            if let Some(progress) = &mut progress {
                progress.update(step);
                // What was trained is worth more than a line about it.
                if let Err(err) = logged {
                    let why = message_of(&err);
                    progress.println(&format!("warning: no more metrics: {why}"));
                    metrics = None;
                }
            }
            Ok(())
        })?;
        if let Some(progress) = &mut progress {
            progress.finish();
        }
        mesh.world.set_step(trainer.step(), "after training");
        let memory = trainer.memory_of_largest_rank()?;
        if is_first {
            let memory = peaks_in_words(&memory);
            print_line(&format!("memory of the largest rank: {memory}"));
        }
        Ok(batches)
    }
}
