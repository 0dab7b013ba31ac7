//! A run: data and model in, training with its progress, metrics and samples, a checkpoint out.

pub(crate) mod announcement;
pub(crate) mod best_weights;
pub(crate) mod end;
pub(crate) mod fingerprint;
pub(crate) mod fit;
pub(crate) mod name;
pub(crate) mod parameter_server;
pub(crate) mod resuming;
pub(crate) mod sampling;
pub(crate) mod saving;
pub(crate) mod stop;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use candle_comm::{Departure, Mesh, ProcessGroup, RunConfig, launch};
use candle_core::{DType, Device, Error, Result};
use candle_launch::PEER_FAILED_EXIT_CODE;
use candle_ops::GpuState;
use candle_parallel::checkpoint::{HfSave, SpaceNeed, check_free_space, with_config_dtype};
use candle_parallel::{ModelPart, Parameters, agree, gather};
use candle_train_models::flops_per_token;
use candle_trainer::{
    Activity, Checkpoints, EvalBatches, EvalHistory, Evaluation, ModelFlops, ParameterServer,
    Tokenizer, TrainConfig, Trainer, TrainingRecord,
};
use toml::Table;

use crate::args::data::DATE;
use crate::args::logs::Log;
use crate::args::samples::SampleArgs;
use crate::args::training::TrainingArgs;
use crate::config_file::{CONFIG_FILE, text_of};
use crate::export::generation_config::GENERATION_FILE;
use crate::export::gguf::GgufExport;
use crate::flags::defaults::Taken;
use crate::memory::allocator::{keep_freed_memory, return_freed_memory};
use crate::output::observer::{Numbers, Observers, RunEvent};
use crate::output::{code_of_refusal, in_words, print_for_all, print_note};
use crate::reading::TrainingData;
use crate::spec::{RanksMemory, RunSpec};
use crate::start::initial_weights::InitialWeights;
use crate::start::start_model::StartModel;
use crate::training_run::best_weights::{remove_best, take_best, tell_of_best};
use crate::training_run::end::End;
use crate::training_run::fingerprint::fingerprint;
use crate::training_run::saving::{leave, save_model};
use crate::training_run::stop::{Stop, Stopped};

/// Everything that the ranks of this process need, read once.
pub struct TrainingRun<'o> {
    /// Who is told what happens.
    pub(crate) observers: Observers<'o>,
    pub(crate) spec: RunSpec,
    pub(crate) ranks: RunConfig,
    pub(crate) samples: SampleArgs,
    /// What may stop it; the time counts since the program began.
    pub(crate) stop: Stop,
    pub(crate) model: StartModel,
    /// The parameters of the whole model, without values.
    pub(crate) whole: Parameters,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) data: TrainingData,
    /// What is trained on what, in words.
    pub(crate) title: String,
    /// The run as a table, to do it again.
    pub(crate) again: Table,
    /// Flags with their values that all ranks must have alike.
    pub(crate) shared: Vec<(String, String)>,
    /// The file that flags came from.
    pub(crate) file: Option<PathBuf>,
    pub(crate) is_date_given: bool,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Trained {
    /// The folder of the trained model, or of its adapter.
    pub output: PathBuf,
    /// Whether an observer or the time ended it before its last step.
    pub is_stopped: bool,
    /// Steps that were done, of this run and of those that it went on from.
    pub steps: usize,
    /// The loss of the last step, on the first rank's process.
    pub loss: Option<f64>,
    /// That of the last evaluation.
    pub eval_loss: Option<f64>,
}

/// What is known of a run when its data is read and its flags are checked: for all ranks.
pub(crate) struct Settled {
    pub train: TrainConfig,
    pub save: HfSave,
    pub record: TrainingRecord,
    /// What it is called, if it begins.
    pub name: String,
    /// Memory that all ranks will hold, if that is known.
    pub memory: Option<RanksMemory>,
}

/// Files that tell what a model is, and not what an adapter is.
const OF_THE_MODEL: [&str; 3] = ["config.json", GENERATION_FILE, "README.md"];

impl TrainingRun<'_> {
    /// Trains and saves as what the program does; the exit code tells how it ended.
    pub(crate) fn run_as_rank(mut self) -> Result<ExitCode> {
        let (ended, culprit) = self.run_ranks()?;
        match (ended, culprit) {
            (Err(err), Some(culprit)) => {
                print_note(&self.stops(&culprit, &in_words(&err)));
                Ok(ExitCode::from(PEER_FAILED_EXIT_CODE))
            }
            (Err(err), None) if self.stop.has_begun() => {
                print_for_all(&in_words(&err));
                Ok(ExitCode::FAILURE)
            }
            (ended, _) => Ok(ended?.exit_code(&self.stop, &self.ranks.env)),
        }
    }

    /// That this rank ends because of another one, in the words of the control plane, of which the launcher shows the first line last; below it
    /// what this rank itself has found.
    fn stops(&self, culprit: &Departure, found: &str) -> String {
        let env = &self.ranks.env;
        let culprit = culprit.to_string();
        let why = culprit.lines().next().unwrap_or_default();
        format!(
            "rank {} on host {} stops: {why}\n  {found}",
            env.rank(),
            env.host()
        )
    }

    /// Trains and saves.
    pub(crate) fn run(mut self) -> Result<Trained> {
        let (ended, _) = self.run_ranks()?;
        let is_stopped = match ended? {
            End::Refused(err) | End::Diverged(err) | End::WithoutGguf(err) => return Err(err),
            End::Complete | End::WithoutCheckpoints(_) => false,
            End::Stopped(_) => true,
        };
        let Numbers {
            steps,
            loss,
            eval_loss,
        } = self.observers.numbers();
        Ok(Trained {
            output: self.spec.training.output.output,
            is_stopped,
            steps,
            loss,
            eval_loss,
        })
    }

    /// What the flags make of the model and the data.
    pub(crate) fn settle(&mut self) -> Result<Settled> {
        // Of this run, not of that which made the model.
        self.model.sidecars.retain(|(name, _)| name != CONFIG_FILE);
        if let Some(date) = self.data.date.filter(|_| !self.is_date_given) {
            let name = DATE.trim_start_matches("--").to_string();
            let section = self.again.entry("data").or_insert(Table::new().into());
            if let Some(section) = section.as_table_mut() {
                section.insert(name, date.to_string().into());
            }
            let reason = "the day on which the run began";
            self.spec.taken.push(Taken::new(DATE, date, reason));
        }
        if let Some(template) = &self.data.chosen_template {
            template.save_among(&mut self.model.sidecars, &self.tokenizer)?;
        }
        let own = text_of(&self.again, &self.spec.taken)?;
        self.model
            .sidecars
            .push((CONFIG_FILE.to_string(), own.into_bytes()));
        let model = self.model.weights.folder();
        let warning = (self.spec.lora).check(self.model.name.as_deref().zip(model))?;
        self.data.warnings.extend(warning);
        let memory = self.spec.choose_packing(&self.ranks.env)?;
        let is_other = self.spec.keep_activations(&self.ranks.env)?;
        let (training, data) = (&self.spec.training, &self.data);
        let vocab_size = self.spec.config.vocab_size;
        for samples in std::iter::once(&data.samples).chain(&data.eval_samples) {
            (self.tokenizer).check_vocab(&[samples.tokens().max_id()], vocab_size)?;
        }
        let save_dtype = training.output.save_dtype;
        let train = training.train_config(&data.samples)?;
        self.evaluation((0, 1), EvalHistory::default())?;
        let config = self
            .model
            .sidecars
            .iter()
            .find(|(name, _)| name == "config.json");
        let config = config.map(|(_, content)| content.as_slice());
        let mut record = TrainingRecord {
            save_dtype: save_dtype.map(|dtype| dtype.as_str().to_string()),
            ..training.record(&train, data, config, model)?
        };
        self.spec.lora.add_to(&mut record)?;
        if self.spec.lora.is_given() {
            // What describes the model is in the model's folder, but for the ends of turns of another template than its own.
            let has_ends = data.chosen_template.is_some();
            let is_of_adapter =
                |name: &str| has_ends && name == GENERATION_FILE || !OF_THE_MODEL.contains(&name);
            self.model.sidecars.retain(|(name, _)| is_of_adapter(name));
        }
        let name = self.name(&record, &self.ranks)?;
        let sidecars = with_config_dtype(self.model.sidecars.clone(), save_dtype)?;
        let beside = training.checkpoints.save_dir.as_deref();
        let samples = data.eval_samples.as_ref();
        let save = HfSave {
            run: Some(training.run_digest(&record, save_dtype, samples)?),
            inputs: self.model.inputs.clone(),
            ..training.output.hf_save(beside, sidecars)
        };
        Ok(Settled {
            train,
            save,
            record,
            name,
            memory: memory.filter(|_| !is_other),
        })
    }

    /// Checks, once it is known where the model will be, where the steps are written to and that there is memory, says what the run will do, and
    /// what it will hold.
    pub(crate) fn check_start(&self, settled: &Settled, output: &Path) -> Result<RanksMemory> {
        let (training, ranks) = (&self.spec.training, &self.ranks);
        let num_steps = settled.train.lr_schedule.num_steps;
        let noted = (training.checkpoints).noted(ranks.env.num_restarts() > 0);
        let of = self.logs_of(&settled.name, noted.is_some());
        let steps = (noted.map(|noted| noted.step), num_steps);
        training.logs.check(output, steps, of)?;
        self.check_gguf(&settled.save)?;
        self.announce_start(&settled.train);
        let memory = settled.memory.clone();
        (self.spec).announce(&self.whole, ranks, &self.observers, memory)
    }

    /// The GGUF file that is written at the end, if one is.
    fn gguf_export(&self, save: &HfSave) -> Option<GgufExport> {
        let base = self.model.weights.folder();
        let base = base.filter(|_| self.spec.lora.is_given());
        let run = save.run.as_deref();
        self.spec.training.output.gguf_export(base, run)
    }

    /// An error if it could not be, before hours of training.
    fn check_gguf(&self, save: &HfSave) -> Result<()> {
        let Some(export) = self.gguf_export(save) else {
            return Ok(());
        };
        let lines = export.check(&self.spec.config, &self.tokenizer)?;
        let file = export.output.display();
        self.observers
            .note(format!("the model goes to the GGUF file {file}, too"));
        lines.into_iter().for_each(|line| self.observers.warn(line));
        Ok(())
    }

    /// What the run will write.
    pub(crate) fn space_needs(&self, save: &HfSave) -> Result<Vec<SpaceNeed>> {
        let keeps_best = self.data.eval_samples.is_some();
        let mut needs = self.spec.space_needs(save, &self.whole, keeps_best)?;
        if let Some(export) = self.gguf_export(save) {
            needs.push(export.space_need(&self.spec.config)?);
        }
        Ok(needs)
    }

    /// Checks what can be checked, trains and saves: how it ended, and which other rank is to blame for a failure.
    fn run_ranks(&mut self) -> Result<(Result<End>, Option<Departure>)> {
        let settled = self.settle()?;
        let training = &self.spec.training;
        let output = training.output.output.as_path();
        self.stop.cleans_up();
        let mut ranks = self.ranks.clone();
        // No other run writes there until this one ends.
        let claimed = (ranks.is_first())
            .then(|| settled.save.check_output())
            .transpose()?;
        if let Some(claimed) = &claimed {
            self.check_start(&settled, claimed.place())?;
        }
        let folders = [
            ("--model", self.model.weights.folder()),
            ("--adapter", self.spec.lora.adapter.as_deref()),
        ];
        ranks.fingerprint = fingerprint(&ranks, &self.shared, &self.data, &folders)?;
        let refusal = code_of_refusal(&ranks.env);
        ranks.failure_exit_code.store(refusal, Ordering::Relaxed);
        let num_steps = settled.train.lr_schedule.num_steps;
        let tell = |end: End| {
            // What keeps a library's run from its end is said by who called it.
            let is_error = matches!(end, End::Refused(_) | End::Diverged(_));
            if is_error && !self.stop.is_of_program() {
                return end;
            }
            // While the others wait: mpirun ends a process when another one has ended with an error.
            let is_alone = ranks.env.world_size() == 1;
            end.tell(&self.stop, num_steps, (output, is_alone), &self.observers);
            end
        };
        let (ends, culprit) = match training.strategy.num_servers() {
            0 => {
                let ends = launch::run(&ranks, |world| {
                    training.ranks.settle();
                    let is_first = world.rank() == 0;
                    let mesh = Mesh::new(world, training.layout.degrees())?;
                    let end = self.run_rank(&settled, &ranks, &mesh, None)?;
                    Ok(if is_first { tell(end) } else { end })
                });
                (ends, None)
            }
            num_servers => self.run_with_servers(num_servers, &settled, &ranks, tell),
        };
        let mut ended = ends.map(|ends| ends.into_iter().next().unwrap_or(End::Complete));
        // A run that failed or was stopped may have nothing else.
        let is_done =
            claimed.is_some() && matches!(ended, Ok(End::Complete | End::WithoutCheckpoints(_)));
        if is_done && let Err(err) = remove_best(output) {
            self.observers.warn(err.to_string());
        }
        if is_done && let Some(export) = self.gguf_export(&settled.save) {
            match export.run() {
                Ok(lines) => {
                    let lines = lines.into_iter().chain([export.in_words()]);
                    lines.for_each(|line| self.observers.note(line));
                }
                Err(err) => {
                    let err = err.context(format!(
                        "the model is saved to {}, and not as a GGUF file",
                        output.display()
                    ));
                    if self.stop.is_of_program() {
                        self.observers.tell(&RunEvent::Failure(&in_words(&err)));
                    }
                    ended = Ok(End::WithoutGguf(err));
                }
            }
        }
        Ok((ended, culprit))
    }

    fn evaluation(
        &self,
        (dp_rank, dp): (usize, usize),
        history: EvalHistory,
    ) -> Result<Option<Evaluation>> {
        let TrainingArgs {
            evaluation,
            batches,
            ..
        } = &self.spec.training;
        let Some(samples) = &self.data.eval_samples else {
            return Ok(None);
        };
        let batches = EvalBatches::new(samples, batches.micro_batch_size, (dp_rank, dp))?;
        Ok(Some(evaluation.evaluation(batches, history)))
    }

    /// One rank's part: of a mesh that trains, or of one of servers.
    pub(crate) fn run_rank(
        &self,
        Settled {
            train,
            save,
            record,
            name,
            ..
        }: &Settled,
        ranks: &RunConfig,
        mesh: &Mesh,
        server: Option<ParameterServer>,
    ) -> Result<End> {
        let training = &self.spec.training;
        let is_restart = ranks.env.num_restarts() > 0;
        // The first rank's.
        let names: Vec<String> = gather(&mesh.world, name)?;
        let mut name = names.into_iter().next().unwrap_or_default();
        let checkpoints = self.resumed(record, is_restart, true, &mesh.world);
        let checkpoints = checkpoints.and_then(|resumed| {
            let checkpoint = resumed.as_ref().map(|it| &it.checkpoint);
            let best = training.folder_of_best()?;
            let resumes_from_best = training
                .checkpoints
                .resumes_from_best(&training.output.output)?;
            if mesh.world.rank() == 0
                && !resumes_from_best
                && let Err(err) = remove_best(&training.output.output)
            {
                self.observers.warn(err.to_string());
            }
            let saver =
                training
                    .checkpoints
                    .saver(&mesh.world, (&name, checkpoint), best.as_deref())?;
            Ok((resumed, saver))
        });
        let (resumed, saver) = match checkpoints {
            Ok(checkpoints) => checkpoints,
            Err(err) => return Ok(End::Refused(err)),
        };
        let is_first = mesh.world.rank() == 0;
        let part = self.part(mesh, is_first)?;
        if let Some(server) = &server {
            server.bound_messages(part.params())?;
        }
        let last_title = match &self.model.weights {
            InitialWeights::Random => "sample",
            InitialWeights::Checkpoint(_) => {
                if resumed.is_none() {
                    self.print_sample("before", mesh, &part)?;
                }
                "after"
            }
        };
        let flops = self.flops(ranks, &part, mesh.world.device())?;
        let mut train = train.clone();
        if let Some(resumed) = &resumed {
            train.lr_schedule.num_steps = self.num_steps(&train, resumed)?;
        }
        let trainer = match server {
            None => Trainer::new(train, mesh, part)?,
            Some(server) => Trainer::of_server(train, mesh, part, server)?,
        };
        let mut trainer = trainer.with_flops(flops);
        let losses = resumed
            .as_ref()
            .map(|resumed| resumed.record.losses.clone());
        trainer = trainer.with_loss_range(training.optimizer.loss_range(losses));
        let history = resumed.as_ref().map(|resumed| resumed.record.evaluation);
        let replica = (mesh.dp.rank(), mesh.dp.world_size());
        let evaluation = self.evaluation(replica, history.unwrap_or_default())?;
        let warning = training.ranks.warning_of_precision(mesh.world.device());
        if let Some(warning) = warning.filter(|_| is_first) {
            self.observers.warn(warning);
        }
        if let Some(resumed) = &resumed {
            trainer.resume(&resumed.checkpoint)?;
        }
        if let Some((saver, every)) = saver {
            // The first rank writes them.
            let sidecars = is_first.then(|| self.model.sidecars.clone());
            let mut saver = saver.with_sidecars(sidecars.unwrap_or_default());
            if evaluation.is_some() {
                saver = saver.keeping_best();
            }
            let record = TrainingRecord {
                evaluation: history.unwrap_or_default(),
                ..record.clone()
            };
            let checkpoints = Checkpoints::new(saver, every, record, is_first);
            trainer = trainer.with_checkpoints(checkpoints);
        }
        if let Some(evaluation) = evaluation {
            trainer = trainer.with_evaluation(evaluation);
        }
        // The checkpoint's files are mapped as long as it lives.
        let position = resumed.map(|resumed| {
            name = resumed.checkpoint.run().to_string();
            resumed.record.position
        });
        let resumed_at = position.is_some().then(|| trainer.step());
        match self.logs(&mesh.world, save, &name, resumed_at) {
            Ok(logs) => {
                let logs = logs.into_iter().flatten();
                logs.for_each(|log| self.observers.push(Box::new(log)));
            }
            Err(err) => return Ok(End::Refused(err)),
        }
        match training.layout.offload().dirs.is_empty() {
            true => keep_freed_memory(),
            false => return_freed_memory(),
        }
        let save_dir = training.checkpoints.save_dir.as_deref();
        if is_first {
            self.stop.speaks(save_dir, trainer.num_steps());
            self.stop.note(trainer.step());
        }
        ranks.failure_exit_code.store(1, Ordering::Relaxed);
        let (to_save, has_patience) = (save.clone(), training.evaluation.patience.is_some());
        let mut trainer = trainer
            .with_stop(self.stop.asks(&self.observers))
            .with_save_at_end(move |trainer| {
                // The best weights of an earlier evaluation are there.
                if has_patience && trainer.evaluations().is_some_and(|it| it.best.is_some()) {
                    return Ok(false);
                }
                trainer.save_hf(&to_save).map(|()| true)
            });
        let batches = match self.fit(&mut trainer, mesh, &name, position) {
            Ok(batches) => batches,
            Err(err) if trainer.has_diverged() => return Ok(End::Diverged(err)),
            Err(err) => {
                if is_first && let Some(folder) = training.folder_of_best()? {
                    tell_of_best(&trainer, &folder, &self.observers);
                }
                return Err(if trainer.has_saved_at_end() {
                    self.after_save(err)
                } else {
                    err
                });
            }
        };
        if trainer.is_stopped() {
            let batches = save_dir.is_some().then_some(&batches);
            let stopped = leave(
                &mut trainer,
                (batches, save_dir),
                save,
                is_first,
                &self.observers,
            )?;
            if is_first && let Some(folder) = training.folder_of_best()? {
                tell_of_best(&trainer, &folder, &self.observers);
            }
            let output_flag = if self.spec.lora.is_given() {
                "--adapter"
            } else {
                "--model"
            };
            return Ok(End::Stopped(Stopped {
                output_flag,
                ..stopped
            }));
        }
        if training.evaluation.patience.is_some() {
            let best = training.folder_of_best()?;
            let folders = best.as_deref().into_iter();
            let folders: Vec<&Path> = folders.chain(training.checkpoints.folders()).collect();
            take_best(&mut trainer, mesh, &folders, &self.observers)?;
        }
        if !trainer.has_saved_at_end() {
            save_model(&trainer, save, is_first)?;
        }
        let printed = self.print_sample(last_title, mesh, trainer.part());
        printed.map_err(|err| self.after_save(err))?;
        Ok(match trainer.num_checkpoints_failed() {
            0 => End::Complete,
            number => End::WithoutCheckpoints(number),
        })
    }

    /// The error of what failed when the trained model had been saved.
    fn after_save(&self, err: Error) -> Error {
        let output = self.spec.training.output.output.display();
        err.context(format!(
            "the trained model is saved to {output}; what came after it failed"
        ))
    }

    /// Checks, on the first rank, that there is room for what the run saves, when what earlier ones have left is gone, and opens what the
    /// steps of it are written to. Every rank must call it.
    fn logs(
        &self,
        world: &ProcessGroup,
        save: &HfSave,
        run: &str,
        resumed_at: Option<usize>,
    ) -> Result<Option<Vec<Log>>> {
        let open = || -> Result<Vec<Log>> {
            check_free_space(&self.space_needs(save)?)?;
            let of = self.logs_of(run, resumed_at.is_some());
            self.spec
                .training
                .logs
                .open(resumed_at, of, &self.observers)
        };
        agree(world, (world.rank() == 0).then(open).transpose())
    }

    /// A rank's part of the model with its initial weights; one rank shows how far it has read them.
    pub(crate) fn part(&self, mesh: &Mesh, is_first: bool) -> Result<ModelPart> {
        let training = &self.spec.training;
        let store = self
            .model
            .weights
            .store(&self.spec, self.model.name.as_deref())?;
        let num_read_bytes = store.checkpoint().map(|source| source.num_read_bytes());
        let num_read_bytes = num_read_bytes.filter(|_| is_first);
        let loading = num_read_bytes.map(|num| Activity::of_bytes("loading weights", None, num));
        let store = store
            .with_data_parallel(training.data_parallel())
            .with_offload(self.spec.offload())
            .with_packed_weights(self.spec.pack_weights);
        let vb = store.builder(training.layout.dtype(), mesh.world.device());
        let seq_len = training.batches.sequences.seq_len();
        let part = training
            .layout
            .part(&self.spec.config, mesh, &vb, seq_len)?;
        drop(loading);
        Ok(part)
    }

    /// The model's arithmetic, and that of all devices if this rank's is known.
    fn flops(&self, ranks: &RunConfig, part: &ModelPart, device: &Device) -> Result<ModelFlops> {
        let num_devices = match ranks.env.world_size() {
            1 => ranks.devices.len(),
            processes => processes,
        };
        let is_narrow = self.spec.training.layout.dtype() != DType::F32;
        let gpu = GpuState::of(device)?.filter(|_| is_narrow);
        let peak = gpu.and_then(|gpu| gpu.peak_tflops());
        Ok(ModelFlops {
            per_token: flops_per_token(
                &self.spec.config,
                part.params(),
                self.spec.training.batches.sequences.seq_len(),
            ),
            peak_per_sec: peak.map(|peak| peak * 1e12 * num_devices as f64),
        })
    }
}
