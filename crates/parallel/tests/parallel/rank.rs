//! A rank that a test trains step by step.

use candle_comm::Mesh;
use candle_core::{DType, Result};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, DistributedOptimizer, Gradients, ModelPart, Optimizer,
    ParamStore, Pass, Pipeline, Schedule,
};

use crate::chain::Chain;

/// A rank with its model, gradients and optimizer.
pub struct Rank {
    pub mesh: Mesh,
    pub part: ModelPart,
    pub pipeline: Pipeline,
    pub gradients: Gradients,
    pub optimizer: DistributedOptimizer,
}

impl Rank {
    pub fn new(mesh: &Mesh, part: ModelPart, rule: impl Optimizer + 'static) -> Result<Self> {
        Ok(Self {
            pipeline: Pipeline::new(Schedule::OneForwardOneBackward, mesh),
            gradients: Gradients::new(part.params(), mesh)?,
            optimizer: DistributedOptimizer::new(part.params(), mesh, rule)?,
            part,
            mesh: mesh.clone(),
        })
    }

    /// The chain, trained by AdamW.
    pub fn chain(mesh: &Mesh, replicas: impl Into<DataParallel>, dtype: DType) -> Result<Self> {
        let store = ParamStore::init(5).with_data_parallel(replicas);
        let chain = Chain {
            dtype,
            ..Chain::default()
        };
        Self::new(mesh, chain.part(mesh, &store)?, adamw())
    }

    /// This replica's part of four micro-batches.
    pub fn batches(&self, seed: u64) -> Result<Vec<Pass>> {
        let (rank, dp) = (self.mesh.dp.rank(), self.mesh.dp.world_size());
        let batches = Chain::default().micro_batches(seed, 4)?;
        Ok(batches[rank * 4 / dp..(rank + 1) * 4 / dp].to_vec())
    }

    pub fn pass(&mut self, batches: &[Pass]) -> Result<()> {
        self.pipeline
            .forward_backward(&self.part, batches, &mut self.gradients)?;
        Ok(())
    }

    /// [`Self::pass`] of [`Self::batches`].
    pub fn pass_of(&mut self, seed: u64) -> Result<()> {
        let batches = self.batches(seed)?;
        self.pass(&batches)
    }

    /// The loss, and the norm of the gradients.
    pub fn update(&mut self) -> Result<(f64, f64)> {
        let report = self.optimizer.step(&mut self.gradients, 0.05, Some(1.0))?;
        Ok((report.loss.mean, report.grad_norm))
    }

    pub fn step(&mut self, seed: u64) -> Result<(f64, f64)> {
        self.pass_of(seed)?;
        self.update()
    }
}

pub fn adamw() -> AdamW {
    AdamW(AdamWConfig::default())
}
