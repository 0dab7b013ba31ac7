//! Parallel layers, tape, pipeline, gradients, ZeRO optimizer and checkpoints for candle.
//!
//! A model is a chain of [`Block`]s, cut into stages, of which each rank has one or several: its [`ModelPart`]. A [`Pipeline`] runs
//! micro-batches through them, each a [`Pass`], and adds to [`Gradients`], which are summed over the ranks while it still computes; a
//! [`DistributedOptimizer`] updates. A whole program, on four ranks that are threads: two pipeline stages of two tensor-parallel ranks.
//!
//! ```
//! use candle_comm::{Degrees, Mesh, launch};
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_parallel::*;
//!
//! const VOCAB: usize = 16;
//! const HIDDEN: usize = 8;
//!
//! /// x + down(gelu(up(x))), the hidden features of `up` divided over the tensor-parallel ranks.
//! struct Mlp(ColumnParallelLinear, RowParallelLinear);
//! impl PlainBlock for Mlp {
//!     fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
//!         let inner = self.0.apply(xs, pass)?.gelu()?;
//!         xs + self.1.apply(&inner, pass)?
//!     }
//! }
//!
//! /// Logits, the vocabulary divided over the tensor-parallel ranks, and the sum of the losses.
//! struct LastBlock(ColumnParallelLinear, Shard, Mesh);
//! impl PlainHead for LastBlock {
//!     fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
//!         let logits = self.0.apply(xs, pass)?.flatten_to(1)?;
//!         let targets = pass.targets()?.flatten_all()?;
//!         let losses = vocab_parallel_cross_entropy(&logits, &targets, &self.1, &self.2.tp)?;
//!         Ok(Loss::new(losses.sum_all()?, pass.num_targets()? as f64))
//!     }
//! }
//!
//! fn main() -> Result<()> {
//!     let losses = launch::threads(4, |world| {
//!         let mesh = Mesh::new(world, Degrees { pp: 2, tp: 2, ..Degrees::default() })?;
//!         let vb = ParamStore::init(0).with_data_parallel(ZeroStage::Two).builder(DType::F32, mesh.world.device());
//!         let part = ModelPart::build(&mesh, &vb, 4, HIDDEN, |index, vb| {
//!             let vb = vb.pp("blocks").pp(index);
//!             Ok(match index {
//!                 0 => layer_block(vocab_parallel_embedding(VOCAB, HIDDEN, &mesh.tp, vb)?),
//!                 1 | 2 => plain_block(Mlp(
//!                     column_parallel_linear(HIDDEN, 4 * HIDDEN, true, &mesh.tp, vb.pp("up"))?,
//!                     row_parallel_linear(4 * HIDDEN, HIDDEN, true, &mesh.tp, vb.pp("down"))?,
//!                 )),
//!                 _ => plain_head(LastBlock(
//!                     column_parallel_linear(HIDDEN, VOCAB, false, &mesh.tp, vb)?,
//!                     Shard::even(0, VOCAB, &mesh.tp)?,
//!                     mesh.clone(),
//!                 )),
//!             })
//!         })?;
//!         let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
//!         let mut gradients = Gradients::new(part.params(), &mesh)?;
//!         let config = AdamWConfig::default();
//!         let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
//!         // Each token is followed by the next one.
//!         let tokens = Tensor::arange(0u32, VOCAB as u32, &Device::Cpu)?.reshape((2, 8))?;
//!         let targets = Tensor::from_iter((1..=VOCAB).map(|id| (id % VOCAB) as u32), &Device::Cpu)?;
//!         let batch = Pass::train(tokens, targets.reshape((2, 8))?);
//!         let mut losses = Vec::new();
//!         for _step in 0..40 {
//!             pipeline.forward_backward(&part, &[batch.clone()], &mut gradients)?;
//!             let report = optimizer.step(&mut gradients, 1e-2, Some(1.0))?;
//!             losses.push(report.loss.mean);
//!         }
//!         Ok(losses)
//!     })?;
//!     assert!(losses[0][39] < 0.5 * losses[0][0], "{:?}", losses[0]);
//!     assert!(losses.iter().all(|of_rank| of_rank == &losses[0]));
//!     Ok(())
//! }
//! ```
//!
//! | folder | what is there |
//! |---|---|
//! | `params` | how a parameter lies on the mesh ([`Placement`]), where it comes from ([`ParamStore`]), its bucket |
//! | `layers` | [`Layer`], the tensor-parallel ones, and the borders of their regions: [`regions`] |
//! | `lora` | [`LoraConfig`]: low-rank adapters beside linear layers, [`LowRank`], and `peft`'s folders |
//! | `pass` | [`Pass`], the [`Region`] of its tensor-parallel ranks, what stays of it ([`Tape`]), and where gradients of weights go: [`GradientSink`] |
//! | `pipeline` | [`Block`], [`ModelPart`] and its tapes |
//! | `schedule` | [`Schedule`], [`Plan`]: who computes what when; its check, its simulation |
//! | `program` | a step as a list of actions, worked out before it runs |
//! | `engine` | [`Pipeline`] carries them out, [`Training`] has all that a loop needs |
//! | `gradients` | [`Gradients`], their reduction over the mesh, norm and loss |
//! | `optimizer` | [`Optimizer`], the rule; [`DistributedOptimizer`], which divides its work over replicas |
//! | `memory` | [`MemoryMeter`]: the bytes that a rank holds, by what they are for |
//! | `planned` | [`MemoryPlan`]: what a step will hold and take, by arithmetic |
//! | `checkpoint` | Hugging Face folders, read and written part by part |
//! | `gguf` | the weights of files for llama.cpp and Ollama |
#![deny(unsafe_code)]

mod agreement;
pub mod checkpoint;
mod checksums;
mod context_parallel;
mod data_parallel;
mod engine;
mod files;
pub mod gguf;
mod gradients;
mod layers;
mod lora;
mod memory;
mod offload;
mod optimizer;
mod params;
mod pass;
mod pipeline;
mod pipeline_layout;
mod placement;
mod planned;
mod program;
mod schedule;
mod view;

pub use agreement::{agree, gather};
pub use context_parallel::{ContextConfig, ContextMethod, ContextParallel, KeptAttention};
pub use data_parallel::{DataParallel, ReduceType, ZeroStage};
pub use engine::{EvalSums, Pipeline, Training};
pub use gradients::{GradientSums, Gradients, ReducedGradients, ReducedLoss};
pub use layers::{
    ColumnParallelLinear, Head, HeadPartition, Layer, LayerRanks, LowRank, RowParallelLinear,
    VocabParallelEmbedding, VocabParallelHead, column_parallel_backward, column_parallel_forward,
    column_parallel_linear, column_parallel_linear_shard, column_parallel_tape,
    linear_cross_entropy, linear_predictions, regions, row_parallel_linear,
    row_parallel_linear_shard, vocab_parallel_cross_entropy, vocab_parallel_embedding,
    vocab_parallel_head,
};
pub use lora::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapter, LoraConfig, LoraTargets};
pub use memory::{
    MemoryCategory, MemoryGuard, MemoryMeter, MemoryReport, MemoryUse, count_memory_with,
};
pub use offload::Offload;
pub use optimizer::{
    AdamW, AdamWConfig, DistributedOptimizer, LossScaling, Needs, Optimizer, OptimizerState,
    ParamGroup, ParamMatrix, ParamSlice, SliceWeight, StepReport, UpdateStep,
};
pub use params::{
    HeldParam, Holder, ModelSpec, PackWeights, Param, ParamBuilder, ParamSpec, ParamStore,
    Parameters, RankSpec, TiledWeight, WEIGHT_INIT, WeightFormat,
};
pub use pass::{
    ContextRank, GradientSink, KeyValueCache, Loss, Pass, PassReport, PipelineRank, Recompute,
    Region, Tape, WeightGrad, WeightHalf,
};
pub use pipeline::{
    Block, ModelPart, PlainBlock, PlainHead, head_block, layer_block, pack, plain_block,
    plain_head, unpack,
};
pub use pipeline_layout::{BlockCosts, PipelineLayout, stage_blocks};
pub use placement::{Gradient, Placement, Shard, part};
pub use planned::{MemoryPlan, Moment, PlannedPasses, PlannedUpdate, PlannedWork};
pub use schedule::{
    Instruction, Instructions, Message, MoveTimes, Plan, Schedule, Simulation, StageTimes, Timed,
    Times, Unit,
};
