//! What a run would do, without doing it: `candle-train finetune --dry-run`.

use candle_comm::ProcessGroup;
use candle_core::{DType, Device, Result};
use candle_parallel::checkpoint::{
    CheckpointSaver, HfSave, SpaceNeed, TrainingCheckpoint, check_free_space, size_in_words,
};
use candle_parallel::{MemoryReport, Parameters};
use candle_trainer::Data;
use candle_trainer::hub::DataUse;
use serde::Serialize;
use serde_json::Value;

use crate::args::logs::LogsOf;
use crate::args::lora::frozen_bits;
use crate::args::training::TrainingArgs;
use crate::output::observer::Observers;
use crate::run::Opened;
use crate::spec::RanksMemory;
use crate::training_run::TrainingRun;

const DONE: &str = "dry run: nothing was trained or written";

/// What a run would do.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DryRun {
    /// Steps of the whole run; `None` where they follow from data that cannot be read without a tokenizer.
    pub steps: Option<usize>,
    /// Values of the whole model, with its adapters.
    pub parameters: usize,
    /// Those of them that are trained.
    pub trained_parameters: usize,
    /// Bits of a value of the matrices that are not trained; `None` without any.
    pub frozen_bits: Option<f64>,
    /// What rank 0 would hold, as metrics have it.
    pub memory: MemoryReport,
}

impl DryRun {
    fn new(steps: Option<usize>, whole: &Parameters, memory: &RanksMemory) -> Self {
        Self {
            steps,
            parameters: whole.num_global_values(),
            trained_parameters: whole.num_trainable_values(),
            frozen_bits: frozen_bits(whole),
            memory: memory.first,
        }
    }

    /// Of a model that has no tokenizer yet: what is known before the data is read.
    pub(crate) fn without_tokens(
        opened: &Opened,
        title: String,
        observers: &Observers,
    ) -> Result<Self> {
        let Opened {
            ranks,
            model,
            whole,
            ..
        } = opened;
        let mut spec = opened.spec.clone();
        let known = spec.choose_packing(&ranks.env)?;
        let is_other = spec.keep_activations(&ranks.env)?;
        let known = known.filter(|_| !is_other);
        let training = &spec.training;
        let steps = training.batches.steps;
        let save = training.output.hf_save(None, model.sidecars.clone());
        let save = match model.weights.folder() {
            None if !spec.lora.is_given() => in_dtype_of_config(save),
            _ => save,
        };
        if ranks.is_first() {
            // They must be there all the same.
            spec.data.find()?;
            if training.evaluation.eval_fraction.is_none() && training.evaluation.has_data() {
                Data::find(&training.evaluation.eval_data, DataUse::Evaluation)?;
            }
            let output = save.of_any_run().look()?;
            check_folders(training, None)?;
            let of = LogsOf {
                run: "",
                is_resumed: true,
                overwrites: true,
            };
            let num_steps = steps.unwrap_or(usize::MAX);
            training.logs.check(&output, (None, num_steps), of)?;
        }
        let described = training.describe(None, steps, ranks);
        observers.note(format!("{title}: {described}"));
        observers.note("the data is not read: the model has no tokenizer.json");
        let memory = spec.announce(whole, ranks, observers, known)?;
        let mut needs = spec.space_needs(&save, whole, training.evaluation.has_data())?;
        needs.extend(spec.offload_needs(&memory, &ranks.env));
        tell_space(&needs, observers);
        if ranks.is_first() {
            check_free_space(&needs)?;
        }
        observers.note(DONE);
        Ok(Self::new(steps, whole, &memory))
    }
}

/// An error if no checkpoint could be written where the run is to write them, which goes on from this one.
fn check_folders(training: &TrainingArgs, resumed: Option<&TrainingCheckpoint>) -> Result<()> {
    match &training.checkpoints.save_dir {
        Some(dir) => {
            CheckpointSaver::check_free(dir)?;
            CheckpointSaver::check_folder(dir, resumed)
        }
        None => Ok(()),
    }
}

impl TrainingRun<'_> {
    /// Makes the checks of a start, and tells what it would do.
    pub(crate) fn dry_run(mut self) -> Result<DryRun> {
        let mut settled = self.settle()?;
        let mut num_steps = settled.train.lr_schedule.num_steps;
        if !self.ranks.is_first() {
            let memory = self.spec.memory(&self.spec.model()?)?;
            return Ok(DryRun::new(Some(num_steps), &self.whole, &memory));
        }
        // Without weights it is not known which run this is.
        let is_known = self.model.weights.folder().is_some() || self.model.name.is_none();
        if !is_known {
            settled.save = settled.save.of_any_run();
            if !self.spec.lora.is_given() {
                settled.save = in_dtype_of_config(settled.save);
            }
        }
        let output = settled.save.look()?;
        let memory = self.check_start(&settled, &output)?;
        let is_restart = self.ranks.env.num_restarts() > 0;
        let alone = ProcessGroup::single(Device::Cpu);
        let resumed = match is_known {
            true => self.resumed(&settled.record, is_restart, false, &alone)?,
            false => None,
        };
        if let Some(resumed) = &resumed {
            resumed.checkpoint.check_model(&self.whole)?;
            num_steps = self.num_steps(&settled.train, resumed)?;
        }
        if is_known {
            let resumed = resumed.as_ref().map(|resumed| &resumed.checkpoint);
            check_folders(&self.spec.training, resumed)?;
        }
        let mut needs = self.space_needs(&settled.save)?;
        needs.extend(self.spec.offload_needs(&memory, &self.ranks.env));
        tell_space(&needs, &self.observers);
        check_free_space(&needs)?;
        self.observers.note(DONE);
        Ok(DryRun::new(Some(num_steps), &self.whole, &memory))
    }
}

/// The save of a model whose weights are not there: in the type that its configuration names, where no flag does.
fn in_dtype_of_config(save: HfSave) -> HfSave {
    let config = save.sidecars.iter().find(|(name, _)| name == "config.json");
    let config = config.and_then(|(_, text)| serde_json::from_slice::<Value>(text).ok());
    let named = config.and_then(|config| {
        let named =
            ["dtype", "torch_dtype"].map(|field| config[field].as_str().map(str::to_string));
        named.into_iter().flatten().next()
    });
    let stored = match named.as_deref() {
        Some("float32") => Some(DType::F32),
        Some("float16") => Some(DType::F16),
        Some("bfloat16") => Some(DType::BF16),
        _ => None,
    };
    HfSave {
        dtype: save.dtype.or(stored),
        ..save
    }
}

/// Says what is needed where, and what there is.
fn tell_space(needs: &[SpaceNeed], observers: &Observers) {
    for need in needs {
        let free = need.free_bytes().map_or(String::new(), |free| {
            format!(", {} free", size_in_words(free))
        });
        observers.note(format!(
            "room for {}: {} in {}{free}",
            need.what,
            size_in_words(need.num_bytes),
            need.folder.display()
        ));
    }
}
