//! What a run says of itself before its first step.

use candle_comm::{Mesh, RankEnv, RunConfig};
use candle_core::Result;
use candle_trainer::{TrainConfig, Trainer, counted, peaks_in_words, warning_of_memory};

use crate::args::lora::adapters_in_words;
use crate::training_run::TrainingRun;

/// Fewer updates than this hardly change a model.
const FEW_STEPS: usize = 10;

impl TrainingRun<'_> {
    /// Says what is trained on what, what was chosen for it, and what may not be what its user wants; for the first rank.
    pub(crate) fn announce_start(&self, train: &TrainConfig, ranks: &RunConfig) {
        let (training, num_steps) = (&self.training, train.lr_schedule.num_steps);
        let described = training.describe(&self.data.samples, num_steps, ranks);
        if let Some(file) = &self.file {
            self.observers.note(format!("flags of {}", file.display()));
        }
        self.observers.note(format!("{}: {described}", self.title));
        if let Some(template) = &self.data.chosen_template {
            self.observers
                .note(format!("chat template: {}", template.path().display()));
        }
        if let Some(idle) = training.without_effect(ranks) {
            self.observers.note(&idle);
        }
        let (context, tp) = (training.layout.context, ranks.degrees.tp);
        let dtype = training.layout.dtype().into();
        if let Ok(Some(words)) = context.in_words(&self.config, tp, dtype) {
            self.observers.note(&words);
        }
        let sequences = (
            training.batches.sequences.seq_len(),
            self.data.samples.are_packed(),
        );
        let on_devices = (&ranks.devices[..], dtype);
        if let Ok(Some(words)) =
            context.attention_in_words((&self.config, tp), sequences, on_devices)
        {
            self.observers.note(&words);
        }
        if let Some(note) = training.layout.recompute.note() {
            self.observers.note(note);
        }
        for warning in &self.data.warnings {
            self.observers.warn(warning);
        }
        let batches = &training.batches;
        let is_counted = batches.steps.is_none();
        if is_counted && (1..FEW_STEPS).contains(&num_steps) {
            self.observers.warn(format!(
                "that is {} of the weights only\nhint: a smaller --global-batch-size or more --epochs make more",
                counted(num_steps, "update")
            ));
        }
        let (global, dp) = (batches.global_batch_size(), ranks.degrees.dp);
        if global % dp != 0 {
            let (least, most) = (global / dp, global.div_ceil(dp));
            self.observers.warn(format!(
                "{dp} replicas divide {global} sequences of a step into shares of {most} and {least}, and some wait for the \
                 others\nhint: a --global-batch-size that is a multiple of {dp}"
            ));
        }
        let micro = batches.micro_batch_size;
        // A step may be as large as that of other replicas, before a restart.
        let accumulation = batches.accumulation();
        let accumulation = accumulation.filter(|_| batches.batch_ramp.is_none());
        if let Some(steps) = accumulation.filter(|steps| micro * dp * steps == global) {
            self.observers.note(format!(
                "a step: micro-batch {micro} x dp {dp} x accumulation {steps} = {}",
                counted(global, "sequence")
            ));
        }
        if !self.taken.is_empty() {
            let taken: Vec<String> = self.taken.iter().map(ToString::to_string).collect();
            self.observers
                .note(format!("chosen for you: {}", taken.join(" ")));
        }
        if let Some(samples) = &self.data.eval_samples {
            let held_out = match self.training.evaluation.eval_fraction {
                Some(_) => " not trained on",
                None => "",
            };
            self.observers
                .note(format!("evaluation on {}{held_out}", samples.summary()));
        }
    }

    /// Says what is trained and what memory it takes. Every rank must call it, and the first one says it.
    pub(crate) fn announce(&self, trainer: &Trainer, mesh: &Mesh) -> Result<()> {
        let (part, params) = (trainer.part(), trainer.part().params());
        let on_gpu = !mesh.world.device().is_cpu();
        let expected = self.memory_plan(params.of_rank(), part.layout(), on_gpu)?;
        let expected = trainer.memory_of_largest_rank(expected.report())?;
        if mesh.world.rank() != 0 {
            return Ok(());
        }
        let ranks = &self.training.ranks;
        if let Some(warning) = ranks.warning_of_precision(mesh.world.device()) {
            self.observers.warn(warning);
        }
        let catalog = params.catalog();
        let num_values = |trainable| -> usize {
            let entries = catalog.iter().filter(|entry| entry.trainable == trainable);
            entries
                .map(|entry| entry.shape.iter().product::<usize>())
                .sum()
        };
        let (trained, frozen) = (num_values(true), num_values(false));
        let num_frozen = catalog.iter().filter(|entry| !entry.trainable).count();
        let said = match num_frozen {
            0 => counted(trained, "parameter"),
            _ => format!(
                "{trained} of {} parameters are trained ({:.2}%){}; frozen: {} of {}",
                trained + frozen,
                100.0 * trained as f64 / (trained + frozen) as f64,
                adapters_in_words(params),
                counted(num_frozen, "tensor"),
                counted(frozen, "value")
            ),
        };
        let batches = &self.training.batches;
        let up_to = if batches.batch_ramp.is_some() {
            "up to "
        } else {
            ""
        };
        self.observers.note(format!(
            "{said}; {up_to}{} per step",
            counted(batches.num_tokens(), "token")
        ));
        self.observers.note(format!(
            "memory of the largest rank, expected: {}",
            peaks_in_words(&expected)
        ));
        if mesh.world.device().is_cpu() {
            // What is wrong with the environment is told before.
            let num_processes = RankEnv::from_env().map_or(1, |env| env.local_world_size());
            let ranks = match num_processes {
                1 => (mesh.world.world_size(), 1),
                _ => (1, num_processes),
            };
            if let Some(warning) = warning_of_memory(&expected, ranks) {
                self.observers.warn(warning);
            }
        }
        Ok(())
    }
}
