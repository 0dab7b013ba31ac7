//! What a run would do, without doing it: `candle-train finetune --dry-run`.

use candle_comm::ProcessGroup;
use candle_core::{Device, Result};
use candle_parallel::checkpoint::{CheckpointSaver, SpaceNeed, check_free_space, size_in_words};
use candle_parallel::{MemoryReport, Parameters};
use serde::Serialize;

use crate::observer::Observers;
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
    /// What rank 0 would hold, as metrics have it.
    pub memory: MemoryReport,
}

impl DryRun {
    fn new(steps: Option<usize>, whole: &Parameters, memory: &RanksMemory) -> Self {
        Self {
            steps,
            parameters: whole.num_global_values(),
            trained_parameters: whole.num_trainable_values(),
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
            spec, ranks, model, ..
        } = opened;
        let steps = spec.training.batches.steps;
        let described = spec.training.describe(None, steps, ranks);
        observers.note(format!("{title}: {described}"));
        observers.note("the data is not read: the model has no tokenizer.json");
        let whole = model.weights.whole(spec, model.name.as_deref())?;
        let memory = spec.announce(whole.params(), ranks, observers)?;
        let output = &spec.training.output;
        let save = output.hf_save(None, model.sidecars.clone());
        save.look()?;
        tell_space(&spec.space_needs(&save, whole.params(), false)?, observers)?;
        observers.note(DONE);
        Ok(Self::new(steps, whole.params(), &memory))
    }
}

impl TrainingRun<'_> {
    /// Makes the checks of a start, and tells what it would do.
    pub(crate) fn dry_run(mut self) -> Result<DryRun> {
        let settled = self.settle()?;
        let output = settled.save.look()?;
        if let Some(dir) = &self.spec.training.checkpoints.save_dir {
            CheckpointSaver::check_free(dir)?;
        }
        let (whole, memory) = self.check_start(&settled, &output)?;
        tell_space(&self.space_needs(&settled.save, &whole)?, &self.observers)?;
        let is_restart = self.ranks.env.num_restarts() > 0;
        let mut num_steps = settled.train.lr_schedule.num_steps;
        // Which weights a checkpoint goes on from is not known before they are there.
        if self.initial_weights.folder().is_some() || self.base_model.is_none() {
            let alone = ProcessGroup::single(Device::Cpu);
            let resumed = self.resumed(&settled.record, is_restart, false, &alone)?;
            if let Some(resumed) = &resumed {
                num_steps = self.num_steps(&settled.train, resumed)?;
            }
        }
        self.observers
            .note("dry run: nothing was trained or written");
        Ok(DryRun::new(Some(num_steps), &whole, &memory))
    }
}

/// Says what is needed where, and what there is.
fn tell_space(needs: &[SpaceNeed], observers: &Observers) -> Result<()> {
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
    check_free_space(needs)
}
