//! A run: data and model in, training with its progress, metrics and samples, a checkpoint out.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_comm::{Mesh, ProcessGroup, RunConfig, launch};
use candle_core::{DType, Device, Result};
use candle_parallel::checkpoint::HfSave;
use candle_parallel::{ParamStore, Stage};
use candle_train::{
    Batches, Metrics, Progress, Tokenizer, Tokens, TrainConfig, Trainer, explain_out_of_memory,
    peaks_in_words,
};
use candle_train_models::{CausalLm, ModelConfig};

use crate::config_dtype::with_config_dtype;
use crate::fingerprint::fingerprint;
use crate::flags::Flags;
use crate::output::print_line;
use crate::samples::SampleArgs;
use crate::save_args::run_digest;
use crate::stop::Stop;
use crate::training_args::TrainingArgs;

/// Everything that the ranks of this process need, read once.
pub(crate) struct TrainingRun<'a> {
    pub training: &'a TrainingArgs,
    pub samples: &'a SampleArgs,
    pub config: ModelConfig,
    pub initial_weights: InitialWeights,
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

impl TrainingRun<'_> {
    /// Checks what can be checked, trains and saves.
    pub(crate) fn run(self, mut ranks: RunConfig, flags: Flags) -> Result<ExitCode> {
        let stop = Stop::new(self.training.batches.max_secs);
        let tokenizer = &self.tokenizer;
        tokenizer.check_vocab(self.tokens.ids(), self.config.vocab_size)?;
        let train = self.training.train_config(&self.tokens)?;
        self.samples.check(tokenizer, &self.config)?;
        let model = match &self.initial_weights {
            InitialWeights::Random => None,
            InitialWeights::Checkpoint(model) => Some(model.as_path()),
        };
        let sidecars = with_config_dtype(self.sidecars.clone(), self.save_dtype)?;
        let save = HfSave {
            dtype: self.save_dtype,
            run: Some(run_digest(&flags, &self.tokens, model)),
            inputs: self.inputs.clone(),
            ..self.training.save.hf_save(self.output, sidecars)
        };
        // No other run writes there until this one ends.
        let claimed = ranks.is_first().then(|| save.check_output()).transpose()?;
        if let Some(claimed) = &claimed {
            self.training.check_metrics(claimed.place())?;
            let num_steps = train.lr_schedule.num_steps;
            let run = self.training.describe(&self.tokens, num_steps, &ranks);
            print_line(&format!("{}: {run}", self.title));
        }
        ranks.fingerprint = fingerprint(&ranks, flags, &self.tokens, model)?;
        let stopped_at = launch::run(&ranks, |world| self.run_rank(&train, (&save, &stop), world))?;
        let stopped_at = stopped_at.into_iter().next().flatten();
        if ranks.is_first() {
            print_line(&format!("saved to {}", self.output.display()));
            if let Some(step) = stopped_at {
                let num_steps = train.lr_schedule.num_steps;
                print_line(&stop.describe(step, num_steps, self.output));
            }
        }
        Ok(match stopped_at {
            Some(_) => stop.exit_code(),
            None => ExitCode::SUCCESS,
        })
    }

    /// One rank's part; the step after which it was stopped, if it was.
    fn run_rank(
        &self,
        train: &TrainConfig,
        (save, stop): (&HfSave, &Stop),
        world: ProcessGroup,
    ) -> Result<Option<usize>> {
        let training = self.training;
        let mesh = Mesh::new(world, training.layout.degrees())?;
        let store = match &self.initial_weights {
            InitialWeights::Random => ParamStore::init(training.batches.seed),
            InitialWeights::Checkpoint(model) => ParamStore::from_pretrained(model)?,
        };
        let store = store.with_data_parallel(training.layout.data_parallel());
        let store = training.optimizer.freeze.apply(store);
        let vb = store.builder(training.layout.dtype.into(), mesh.world.device());
        let stage = CausalLm::stage(&self.config, &mesh, &vb)
            .map_err(|err| explain_out_of_memory(err, mesh.world.device()))?;
        let stage = stage.with_recompute(|_| training.layout.recompute.into());
        training.optimizer.freeze.check(stage.params())?;
        let is_first = mesh.world.rank() == 0;
        if is_first {
            save.check_space(stage.params())?;
        }
        let last_title = match &self.initial_weights {
            InitialWeights::Random => {
                if is_first {
                    let num_values = stage.params().num_global_values();
                    print_line(&format!("{num_values} parameters"));
                }
                "sample"
            }
            InitialWeights::Checkpoint(_) => {
                self.print_sample("before", &mesh, &stage)?;
                "after"
            }
        };
        let trainer = self.fit(train, stop, &mesh, stage)?;
        if trainer.is_stopped() {
            trainer.on_stop(save)?;
            return Ok(Some(trainer.step()));
        }
        self.print_sample(last_title, &mesh, trainer.stage())?;
        trainer.save_hf(save)?;
        Ok(None)
    }

    /// Trains this rank's stage; the first rank shows progress and writes metrics.
    fn fit(&self, train: &TrainConfig, stop: &Stop, mesh: &Mesh, stage: Stage) -> Result<Trainer> {
        let (dp_rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
        let batch_config = self.training.batches.config();
        let batches = Batches::new(&self.tokens, batch_config, dp_rank, dp, &Device::Cpu)?;
        let is_first = mesh.world.rank() == 0;
        let metrics = self.training.metrics.as_ref().filter(|_| is_first);
        let mut metrics = metrics.map(Metrics::create).transpose()?;
        let mut progress = is_first.then(|| Progress::new(train.lr_schedule.num_steps));
        let trainer = Trainer::new(train.clone(), mesh, stage)?;
        let mut trainer = trainer.with_stop(stop.asks());
        trainer.train(&batches, |step| {
            if let Some(metrics) = &mut metrics {
                metrics.log(step)?;
            }
            if let Some(progress) = &mut progress {
                progress.update(step);
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
        Ok(trainer)
    }
}
