//! What a run says of itself before its first step.

use candle_comm::RunConfig;
use candle_core::Result;
use candle_parallel::Parameters;
use candle_trainer::{TrainConfig, check_memory, counted, memory_in_words, peaks_in_words};

use crate::args::choices::name_of;
use crate::args::lora::{adapters_in_words, frozen_bits, other_forms};
use crate::output::observer::Observers;
use crate::spec::{RanksMemory, RunSpec};
use crate::training_run::TrainingRun;

/// Fewer updates than this hardly change a model.
const FEW_STEPS: usize = 10;

impl TrainingRun<'_> {
    /// Says what is trained on what, what was chosen for it, and what may not be what its user wants; for the first rank.
    pub(crate) fn announce_start(&self, train: &TrainConfig) {
        let (training, ranks) = (&self.spec.training, &self.ranks);
        let num_steps = train.lr_schedule.num_steps;
        let described = training.describe(Some(&self.data.samples), Some(num_steps), ranks);
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
        let dtype = training.layout.dtype();
        if let Ok(Some(words)) = context.in_words(&self.spec.config, tp, dtype) {
            self.observers.note(&words);
        }
        let sequences = (
            training.batches.sequences.seq_len(),
            self.data.samples.are_packed(),
        );
        let on_devices = (&ranks.devices[..], dtype);
        if let Ok(Some(words)) =
            context.attention_in_words((&self.spec.config, tp), sequences, on_devices)
        {
            self.observers.note(&words);
        }
        if let Some(note) = training.layout.recompute.note() {
            self.observers.note(note);
        }
        for line in training.never_reached(&train.lr_schedule) {
            self.observers.warn(line);
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
        if let Some(samples) = &self.data.eval_samples {
            let held_out = match self.spec.training.evaluation.eval_fraction {
                Some(_) => " not trained on",
                None => "",
            };
            self.observers
                .note(format!("evaluation on {}{held_out}", samples.summary()));
        }
    }
}

impl RunSpec {
    /// Says what was chosen for the run, what is trained of the whole model, and what memory the ranks will take: how much, if it is not known.
    ///
    /// # Errors
    /// More than this machine has.
    pub(crate) fn announce(
        &self,
        whole: &Parameters,
        ranks: &RunConfig,
        observers: &Observers,
        known: Option<RanksMemory>,
    ) -> Result<RanksMemory> {
        if !self.taken.is_empty() {
            let taken: Vec<String> = self.taken.iter().map(ToString::to_string).collect();
            observers.note(format!("chosen for you: {}", taken.join(" ")));
        }
        let all = whole.num_global_values();
        let trained = whole.num_trainable_values();
        let catalog = whole.catalog();
        let said = match catalog.iter().filter(|entry| !entry.trainable).count() {
            0 => counted(trained, "parameter"),
            num_frozen => format!(
                "{trained} of {all} parameters are trained ({:.2}%){}; frozen: {} of {}",
                100.0 * trained as f64 / all as f64,
                adapters_in_words(whole),
                counted(num_frozen, "tensor"),
                counted(all - trained, "value")
            ),
        };
        let batches = &self.training.batches;
        let up_to = if batches.batch_ramp.is_some() {
            "up to "
        } else {
            ""
        };
        observers.note(format!(
            "{said}; {up_to}{} per step",
            counted(batches.num_tokens(), "token")
        ));
        if let (Some(format), Some(bits)) = (self.lora.base_dtype, frozen_bits(whole)) {
            let name = name_of(&format);
            observers.note(format!(
                "the matrices beside adapters, --base-dtype {name}: {bits:.1} bits a value, embedding and head counted"
            ));
            for line in other_forms(format, whole) {
                observers.note(line);
            }
        }
        let memory = match known {
            Some(memory) => memory,
            None => self.memory(&self.model()?)?,
        };
        observers.note(format!(
            "memory of the largest rank, expected: {}",
            peaks_in_words(&memory.largest)
        ));
        observers.note(format!(
            "memory of the largest rank, expected at a time: {}",
            memory_in_words(memory.peak)
        ));
        if self.kept_activations > 0 {
            observers.note(format!(
                "up to {} of a rank's activations stay in memory: half of what the run is expected to leave of it; what is more goes to files",
                memory_in_words(self.kept_activations)
            ));
        }
        let (here, num_processes) = self.ranks_here(&ranks.env);
        let (peaks, least) = match self.on_gpus {
            true => {
                let held = memory.on_host(here, self.degrees());
                (held, held)
            }
            false => memory.of(here, self.degrees()),
        };
        let warning = check_memory(peaks, least, num_processes)?;
        warning.iter().for_each(|warning| observers.warn(warning));
        Ok(memory)
    }
}
