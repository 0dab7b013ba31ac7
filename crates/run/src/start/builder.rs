//! A run described in a line of code.

use std::path::Path;

use candle_trainer::DataSpec;

use crate::run::Run;
use crate::start::Start;
use crate::start::finetune::Finetune;
use crate::start::pretrain::Pretrain;

impl Finetune {
    /// A run that trains the checkpoint in a folder, or of this name on the Hugging Face hub (`org/name[@revision]`).
    pub fn new(model: impl AsRef<str>) -> Self {
        let mut run = Self::default();
        run.start.model = model.as_ref().to_string();
        run
    }

    /// Trains low-rank adapters of this rank, and not the weights themselves (LoRA, arXiv:2106.09685).
    pub fn lora(mut self, rank: usize) -> Self {
        self.start.adapters.lora_rank = Some(rank);
        self
    }
}

impl Pretrain {
    /// A run that trains a new model of the sizes by default.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<S: Start> Run<S> {
    /// Learns from this file, folder or dataset, besides those named before.
    pub fn data(mut self, path: impl AsRef<Path>) -> Self {
        self.data.data.push(DataSpec::new(path));
        self
    }

    /// Passes over the data.
    pub fn epochs(mut self, epochs: impl Into<f64>) -> Self {
        self.training.batches.epochs = epochs.into();
        self.training.batches.steps = None;
        self
    }

    /// Optimizer steps, in place of passes over the data.
    pub fn steps(mut self, steps: usize) -> Self {
        self.training.batches.steps = Some(steps);
        self
    }

    /// Highest learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.training.optimizer.lr = Some(lr);
        self
    }

    /// Length of a sequence, in tokens.
    pub fn seq_len(mut self, tokens: usize) -> Self {
        self.training.batches.sequences.seq_len = Some(tokens);
        self
    }

    /// Sequences that pass through the model at once.
    pub fn micro_batch_size(mut self, sequences: usize) -> Self {
        self.training.batches.micro_batch_size = sequences;
        self
    }

    /// Sequences of an optimizer step, over all replicas.
    pub fn global_batch_size(mut self, sequences: usize) -> Self {
        self.training.batches.global_batch_size = Some(sequences);
        self
    }

    /// Tensor-parallel ranks, which share each layer.
    pub fn tp(mut self, ranks: usize) -> Self {
        self.training.layout.tp = ranks;
        self
    }

    /// Pipeline-parallel ranks, which have the layers one after the other.
    pub fn pp(mut self, ranks: usize) -> Self {
        self.training.layout.pp = ranks;
        self
    }

    /// Data-parallel replicas, which share each step.
    pub fn dp(mut self, replicas: usize) -> Self {
        self.training.layout.dp = Some(replicas);
        self
    }

    /// The folder of the trained model, or of its adapter.
    pub fn output(mut self, folder: impl AsRef<Path>) -> Self {
        self.training.output.output = folder.as_ref().to_path_buf();
        self
    }

    /// Has the model continue this text before and after training.
    pub fn prompt(mut self, text: impl AsRef<str>) -> Self {
        self.samples.prompt = Some(text.as_ref().to_string());
        self
    }
}
