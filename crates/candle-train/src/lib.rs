//! Train and fine-tune language models on [candle](https://docs.rs/candle-core).
//!
//! There are three ways in.
//!
//! **A run in a line**, of a checkpoint of `transformers` in a folder or on the Hugging Face hub:
//!
//! ```no_run
//! use candle_train::prelude::*;
//!
//! let trained = Finetune::new("HuggingFaceTB/SmolLM2-135M").data("chat.jsonl").lora(16).epochs(3).train()?;
//! println!("a loss of {:?}, in {}", trained.loss, trained.output.display());
//! # Ok::<(), Error>(())
//! ```
//!
//! Each flag of the command line is a field of the [`Run`] that this is, and [observers](Observers) see what happens and may stop it:
//!
//! ```
//! use candle_train::prelude::*;
//! # let dir = tempfile::tempdir().unwrap();
//! # let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/gqa/model");
//! # let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/text.txt");
//!
//! let mut run = Finetune::new(model).data(text).seq_len(32).lr(1e-3).steps(50);
//! # run = run.output(dir.path().join("out")).dp(1);
//! run.training.optimizer.weight_decay = 0.1;
//! let until = |event: &RunEvent| match event {
//!     RunEvent::Train(TrainEvent::Step(step)) if step.loss < 6.0 => ControlFlow::Break(()),
//!     _ => ControlFlow::Continue(()),
//! };
//! let trained = run.train_with(Observers::none().and(until))?;
//! assert!(trained.is_stopped && trained.steps < 50);
//! # Ok::<(), Error>(())
//! ```
//!
//! **The command** `candle-train`, of the crate `candle-train-cli`: the same runs, from flags or a TOML file.
//!
//! **A loop of one's own**, with a model of one's own or one of [`models`]. A model is a chain of blocks, a block reads as on one device,
//! and the loss is the same on every layout:
//!
//! ```
//! use candle_train::prelude::*;
//!
//! struct Mlp(ColumnParallelLinear, RowParallelLinear);
//!
//! impl PlainBlock for Mlp {
//!     fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
//!         xs + self.1.apply(&self.0.apply(xs, pass)?.gelu()?, pass)?
//!     }
//! }
//!
//! fn block(index: usize, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Block> {
//!     let vb = vb.pp(index);
//!     Ok(match index {
//!         0 => layer_block(vocab_parallel_embedding(256, 32, tp, vb)?),
//!         1 | 2 => plain_block(Mlp(
//!             column_parallel_linear(32, 64, true, tp, vb.pp("up"))?,
//!             row_parallel_linear(64, 32, true, tp, vb.pp("down"))?,
//!         )),
//!         _ => head_block(vocab_parallel_head(256, 32, tp, vb)?),
//!     })
//! }
//!
//! let losses = launch::threads(8, |world| {
//!     let mesh = Mesh::new(world, Degrees { pp: 2, dp: 2, tp: 2, ..Degrees::default() })?;
//!     let vb = ParamStore::init(0).builder(DType::F32, mesh.world.device());
//!     let part = ModelPart::build(&mesh, &vb, 4, 32, |index, vb| block(index, &mesh.tp, vb))?;
//!     let mut training = Training::new(part, &mesh, Schedule::OneForwardOneBackward, AdamW::default())?;
//!     let mut losses = Vec::new();
//!     for _ in 0..5 {
//!         let bytes = Tensor::arange(0u32, 16, &Device::Cpu)?.reshape((1, 16))?;
//!         let micro_batches = [Pass::train(bytes.clone(), bytes)];
//!         losses.push(training.step(&micro_batches, 1e-2, Some(1.0))?.loss.mean);
//!     }
//!     Ok(losses)
//! })?;
//! assert!(losses[0][4] < losses[0][0]);
//! # Ok::<(), Error>(())
//! ```

#![forbid(unsafe_code)]

pub use candle_comm as comm;
pub use candle_data as data;
pub use candle_gguf as gguf;
pub use candle_ops as ops;
pub use candle_parallel as parallel;
pub use candle_train_models as models;
pub use candle_train_run as run;
pub use candle_trainer as trainer;

pub use candle_train_run::{
    Console, Finetune, Observer, Observers, Pretrain, Run, RunEvent, Trained,
};

/// What most programs need.
pub mod prelude {
    pub use std::ops::ControlFlow;

    pub use candle_comm::{Degrees, Mesh, ProcessGroup, ReduceOp, launch};
    pub use candle_core::{DType, Device, Error, Module, Result, Tensor};
    pub use candle_nn::Init;
    pub use candle_ops::{IGNORE_INDEX, rms_norm};
    pub use candle_parallel::checkpoint::HfSave;
    pub use candle_parallel::{
        AdamW, AdamWConfig, Block, ColumnParallelLinear, DistributedOptimizer, Gradient,
        GradientSink, Gradients, Layer, Loss, ModelPart, ParamBuilder, ParamStore, Pass, Pipeline,
        Placement, PlainBlock, PlainHead, Recompute, Region, RowParallelLinear, Schedule, Shard,
        Training, WEIGHT_INIT, ZeroStage, column_parallel_linear, head_block, layer_block,
        plain_block, plain_head, regions, row_parallel_linear, vocab_parallel_cross_entropy,
        vocab_parallel_embedding, vocab_parallel_head,
    };
    pub use candle_train_models::{CausalLm, ModelConfig};
    pub use candle_train_run::{
        Console, Finetune, Observer, Observers, Pretrain, Run, RunEvent, Trained,
    };
    pub use candle_trainer::{
        Batches, LrSchedule, Samples, Tokenizer, TrainConfig, TrainEvent, Trainer,
    };
}

/// The examples of the repository's README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
