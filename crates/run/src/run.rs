//! A run as a value.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_comm::RunConfig;
use candle_core::{Device, Error, Result, bail};
use candle_launch::NEEDS_MPI_EXIT_CODE;
use candle_parallel::{PackWeights, Parameters};
use candle_train_models::ModelConfig;
use candle_trainer::{TokenCache, Tokenizer};
use clap::{Args, Command};
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Table, Value};

use crate::args::choices::PackChoice;
use crate::args::data::DataArgs;
use crate::args::samples::SampleArgs;
use crate::args::training::TrainingArgs;
use crate::config_file::read_table;
use crate::dry_run::DryRun;
use crate::flags::idle::Idle;
use crate::flags::{Layer, arguments, default_of, is_contradicted, parse_layers, parse_words};
use crate::output::observer::Observers;
use crate::reading::DataModel;
use crate::spec::{RunSpec, check_flags};
use crate::start::Start;
use crate::start::start_model::StartModel;
use crate::training_run::stop::Stop;
use crate::training_run::{Trained, TrainingRun};

/// Everything that decides a run: what the flags of a command line fill, what a TOML file holds, what ranks compare.
///
/// A field is a flag, and its name in a file: `training.optimizer.weight_decay` is `--weight-decay`, and `weight-decay` in the
/// section `[optimizer]`, or in none. A field that is `None` is chosen when the run starts, as its documentation says.
///
/// ```
/// use candle_train_run::Finetune;
///
/// let mut run = Finetune::new("org/name").data("chat.jsonl").lora(16);
/// run.training.optimizer.weight_decay = 0.1;
/// let file = run.to_toml()?;
/// assert!(file.contains("[optimizer]\nweight-decay = 0.1\n"));
/// let read: Finetune = toml::from_str(&file).unwrap();
/// assert_eq!(read.training.optimizer.weight_decay, 0.1);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Run<S: Start> {
    /// The weights it begins with.
    #[command(flatten)]
    #[serde(flatten)]
    pub start: S,
    /// What it learns from.
    #[command(flatten)]
    pub data: DataArgs,
    /// How it learns.
    #[command(flatten)]
    #[serde(flatten)]
    pub training: TrainingArgs,
    /// What the model writes meanwhile.
    #[command(flatten, next_help_heading = "Samples")]
    pub samples: SampleArgs,
    /// The file that it was read from, if it was.
    #[arg(skip)]
    #[serde(skip)]
    pub(crate) file: Option<PathBuf>,
}

impl<S: Start> Default for Run<S> {
    fn default() -> Self {
        Self::from_table(&Table::new()).unwrap_or_else(|_| default_of())
    }
}

impl<'de, S: Start> Deserialize<'de> for Run<S> {
    /// As [`Run::from_table`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let table = Table::deserialize(deserializer)?;
        Self::from_table(&table).map_err(serde::de::Error::custom)
    }
}

impl<S: Start> Run<S> {
    /// The run that a table describes: flags by their names, in sections or not. Other flags have their defaults.
    ///
    /// # Errors
    /// A key that is no flag, a value that a flag does not take, flags that contradict each other.
    pub fn from_table(table: &Table) -> Result<Self> {
        let command = arguments::<Self>(S::COMMAND);
        let defaults = S::defaults();
        let mut layers = [
            Layer::of(&command, table, &Self::sections())?,
            Layer::of(&command, &defaults, &[])?.as_defaults(),
        ];
        let parse = |words| parse_words(&command, words);
        parse_layers(&mut layers, |_| false, parse, Self::idle)
    }

    /// As [`Self::from_table`] of a TOML file.
    ///
    /// # Errors
    /// Besides, a file that cannot be read or is no TOML.
    pub fn from_toml(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let run = Self::from_table(&read_table(path)?);
        let run = run.map_err(|err| err.context(path.display().to_string()))?;
        Ok(Self {
            file: Some(path.to_path_buf()),
            ..run
        })
    }

    /// The same run, known to be read from this file.
    pub fn with_file(self, file: Option<PathBuf>) -> Self {
        Self { file, ..self }
    }

    /// Does what it says, as the ranks of this process, with signals that stop it, and tells how it goes on stdout and stderr. The exit code
    /// tells if a signal stopped it before the end, or a failure, which has been told.
    ///
    /// # Errors
    /// What keeps the first step from being done.
    pub fn train_as_rank(&self) -> Result<ExitCode> {
        let is_mesh = self.training.strategy.num_servers() == 0;
        if is_mesh && self.training.ranks.needs_mpi()? {
            return Ok(ExitCode::from(NEEDS_MPI_EXIT_CODE));
        }
        let stop = Stop::at_signals(self.training.batches.max_secs);
        let opened = self.open(true)?;
        let cache = TokenCache::from_env();
        self.read(opened, cache, stop, Observers::console())?
            .run_as_rank()
    }

    /// Does what it says, with the ranks as threads of this process, or with this process as the rank that a launcher has made it, and tells
    /// how it goes on stdout and stderr.
    ///
    /// # Errors
    /// What keeps it from being done, or done to the end.
    pub fn train(&self) -> Result<Trained> {
        self.train_with(Observers::console())
    }

    /// As [`Self::train`], telling others how it goes.
    ///
    /// # Errors
    /// As [`Self::train`].
    pub fn train_with(&self, observers: Observers) -> Result<Trained> {
        self.check()?;
        let stop = Stop::new(self.training.batches.max_secs);
        self.read(self.open(true)?, TokenCache::from_env(), stop, observers)?
            .run()
    }

    /// What it would do, told on stdout and stderr: it makes every check of a start, and writes and trains nothing. The model's weights need not
    /// be there, nor its tokenizer, without which the data is not read; of a model on the hub none are fetched.
    ///
    /// # Errors
    /// What keeps the first step from being done.
    pub fn dry_run(&self) -> Result<DryRun> {
        self.dry_run_with(Observers::console())
    }

    /// As [`Self::dry_run`], telling others.
    ///
    /// # Errors
    /// As [`Self::dry_run`].
    pub fn dry_run_with(&self, observers: Observers) -> Result<DryRun> {
        self.check()?;
        self.told(observers)
    }

    /// As [`Self::dry_run`] of a command line, which has checked it.
    ///
    /// # Errors
    /// As [`Self::dry_run`].
    pub fn dry_run_as_rank(&self) -> Result<DryRun> {
        self.told(Observers::console())
    }

    fn told(&self, observers: Observers) -> Result<DryRun> {
        let opened = self.open(false)?;
        // What other ranks would say is the same.
        let observers = match opened.ranks.is_first() {
            true => observers,
            false => Observers::none(),
        };
        if opened.tokenizer.is_none() {
            let title = self.start.title(&self.data, &opened.model);
            return DryRun::without_tokens(&opened, title, &observers);
        }
        let stop = Stop::new(self.training.batches.max_secs);
        let cache = TokenCache::from_env().map(TokenCache::read_only);
        self.read(opened, cache, stop, observers)?.dry_run()
    }

    /// The run of a model with this configuration, with everything filled that flags leave open: on CPUs, in so many processes, or with 1 as
    /// many threads as the flags need.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn spec(&self, config: &ModelConfig, num_ranks: usize) -> Result<RunSpec> {
        self.check()?;
        let mut training = self.training.clone();
        training.fill_replicas(num_ranks);
        Ok(self.filled(training, config, num_ranks, false, false))
    }

    fn filled(
        &self,
        mut training: TrainingArgs,
        config: &ModelConfig,
        num_ranks: usize,
        on_gpus: bool,
        is_restart: bool,
    ) -> RunSpec {
        let lora = self.start.adapters();
        let taken = training.fill(config, lora.is_given(), on_gpus, is_restart);
        let seq_len = training.batches.sequences.seq_len();
        let pack_weights = match training.layout.pack_weights {
            PackChoice::On if !on_gpus && training.strategy.num_servers() == 0 => PackWeights::All,
            // With auto what the machine has room for is looked at when ranks start.
            _ => PackWeights::Off,
        };
        RunSpec {
            longer: self.start.longer(config, seq_len),
            data: self.data.clone(),
            config: config.clone(),
            training,
            lora,
            taken,
            num_ranks,
            on_gpus,
            samples: None,
            pack_weights,
            kept_activations: 0,
        }
    }

    /// The model and its tokenizer, and all that can be checked before the data is read. Unless it `needs_weights`, the model may be there
    /// without them, and without a tokenizer.
    fn open(&self, needs_weights: bool) -> Result<Opened> {
        let mut training = self.training.clone();
        check_flags(&training, &self.start.adapters(), &self.data)?;
        let ranks = training.run_config_with_defaults()?;
        let mut model = S::model(self, needs_weights)?;
        let on_gpus = ranks.devices.iter().all(Device::is_cuda);
        let is_restart = ranks.env.num_restarts() > 0;
        let num_ranks = ranks.env.world_size();
        let mut spec = self.filled(training, &model.config, num_ranks, on_gpus, is_restart);
        spec.check()?;
        let folders = model.inputs.clone();
        spec.training.check_folders(folders, &ranks)?;
        let tokenizer = S::tokenizer(self, &mut model, ranks.is_first())?;
        // It may have another number of tokens.
        spec.config = model.config.clone();
        spec.check()?;
        if let Some(tokenizer) = &tokenizer {
            self.samples.check(tokenizer, &spec.config)?;
        }
        let whole = model.weights.whole(&spec, model.name.as_deref())?;
        Ok(Opened {
            whole: whole.params().clone(),
            spec,
            ranks,
            model,
            tokenizer,
        })
    }

    /// Reads the data, of which tokens may be in the cache.
    fn read<'o>(
        &self,
        opened: Opened,
        cache: Option<TokenCache>,
        stop: Stop,
        observers: Observers<'o>,
    ) -> Result<TrainingRun<'o>> {
        let Opened {
            mut spec,
            ranks,
            mut model,
            whole,
            tokenizer,
        } = opened;
        let Some(tokenizer) = tokenizer else {
            bail!("the model has no tokenizer.json, with which the data could be read");
        };
        let of_model = DataModel {
            tokenizer: &tokenizer,
            dir: model.dir.as_deref(),
            adapter: spec.lora.adapter.as_deref(),
        };
        let data = (spec.data).read(of_model, &spec.training, &ranks, cache)?;
        spec.samples = Some((data.samples.len(), data.samples.longest()));
        let title = self.start.title(&self.data, &model);
        model.inputs.extend(data.inputs.iter().cloned());
        Ok(TrainingRun {
            observers,
            samples: self.samples.clone(),
            stop,
            tokenizer,
            title,
            data,
            model,
            whole,
            again: self.to_repeat(&spec.training)?,
            shared: self.shared()?,
            file: self.file.clone(),
            is_date_given: self.data.date.is_some(),
            spec,
            ranks,
        })
    }

    /// Checks what its values tell alone.
    ///
    /// # Errors
    /// A value that its flag does not take; a flag that contradicts another one, or would do nothing.
    pub fn check(&self) -> Result<()> {
        Self::from_table(&self.changed()?).map(drop)
    }

    /// All values, in sections.
    ///
    /// # Errors
    /// A path that is no Unicode.
    pub fn to_table(&self) -> Result<Table> {
        Table::try_from(self).map_err(Error::wrap)
    }

    /// Those that are not the default, in sections.
    ///
    /// # Errors
    /// As [`Self::to_table`].
    pub fn changed(&self) -> Result<Table> {
        let mut table = self.to_table()?;
        remove_same(&mut table, &Self::default().to_table()?);
        // What another flag has taken the place of.
        let (command, bare) = (arguments::<Self>(S::COMMAND), default_of::<Self>());
        let (given, bare) = (flat(&table), flat(&bare.to_table()?));
        let is_replaced =
            |key: &str| given.get(key) == bare.get(key) && is_contradicted(&command, key, &given);
        for (_, section) in &mut table {
            if let Value::Table(section) = section {
                section.retain(|key, _| !is_replaced(key));
            }
        }
        Ok(table)
    }

    /// The text of a file for [`Self::from_toml`], without what is by default.
    ///
    /// # Errors
    /// As [`Self::to_table`].
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(&self.changed()?).map_err(Error::wrap)
    }

    /// Names and values of the flags that all ranks must have alike; where a host has its files, and its devices, may differ.
    ///
    /// # Errors
    /// As [`Self::to_table`].
    pub fn shared(&self) -> Result<Vec<(String, String)>> {
        let mut shared = self.clone();
        shared.start = self.start.shared();
        shared.data = shared.data.shared();
        shared.training = shared.training.shared();
        let flat = flat(&shared.to_table()?);
        let command: Command = arguments::<Self>(S::COMMAND);
        let names = command.get_arguments().filter_map(|arg| arg.get_long());
        let names = names.filter(|name| *name != "help");
        let value = |name: &str| flat.get(name).map_or(String::new(), in_words);
        Ok(names
            .map(|name| (format!("--{name}"), value(name)))
            .collect())
    }

    /// Without what is by default, or over when the run is done again.
    ///
    /// # Errors
    /// As [`Self::to_table`].
    pub(crate) fn to_repeat(&self, training: &TrainingArgs) -> Result<Table> {
        let again = Self {
            training: training.to_repeat(),
            ..self.clone()
        };
        again.changed()
    }

    /// Flags that would do nothing.
    pub fn idle(&self) -> Vec<Idle> {
        let mut idle = self.training.idle();
        idle.extend(self.samples.idle());
        idle
    }

    /// Names of the sections.
    pub fn sections() -> Vec<String> {
        let table = default_of::<Self>().to_table().unwrap_or_default();
        let sections = table.into_iter().filter(|(_, value)| value.is_table());
        sections.map(|(name, _)| name).collect()
    }
}

/// What is known of a run before its data.
pub(crate) struct Opened {
    pub spec: RunSpec,
    pub ranks: RunConfig,
    pub model: StartModel,
    /// The parameters of the whole model, without values.
    pub whole: Parameters,
    pub tokenizer: Option<Tokenizer>,
}

/// Without what is the same in `other`.
fn remove_same(table: &mut Table, other: &Table) {
    table.retain(|key, value| match (value, other.get(key)) {
        (Value::Table(section), Some(Value::Table(other))) => {
            remove_same(section, other);
            !section.is_empty()
        }
        (value, other) => other != Some(&*value),
    });
}

/// The values of all sections, without these.
pub fn flat(table: &Table) -> Table {
    let mut flat = Table::new();
    for (key, value) in table {
        match value {
            Value::Table(section) => flat.extend(section.clone()),
            value => drop(flat.insert(key.clone(), value.clone())),
        }
    }
    flat
}

/// A value as on a command line.
fn in_words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            let values: Vec<String> = values.iter().map(in_words).collect();
            values.join(" ")
        }
        value => value.to_string(),
    }
}
