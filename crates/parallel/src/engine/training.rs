//! A model, its schedule, its gradients and its optimizer as one.

use candle_comm::Mesh;
use candle_core::{DType, Result};

use super::eval_sums::EvalSums;
use super::pipeline::Pipeline;
use crate::checkpoint::HfSave;
use crate::gradients::{Gradients, ReducedGradients};
use crate::optimizer::{DistributedOptimizer, LossScaling, Optimizer, StepReport};
use crate::pass::Pass;
use crate::pipeline::ModelPart;
use crate::schedule::Instructions;

/// A rank's part of a model in training: by a schedule, with a rule, on all layouts alike.
///
/// Every rank of the mesh calls the same methods. It is made of a [`Pipeline`], [`Gradients`] and a [`DistributedOptimizer`], for loops that do something
/// between their parts of a step.
///
/// ```
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_comm::{Degrees, Mesh, launch};
/// use candle_parallel::*;
///
/// fn main() -> Result<()> {
///     let losses = launch::threads(2, |world| {
///         let mesh = Mesh::new(world, Degrees { dp: 2, ..Degrees::default() })?;
///         let vb = ParamStore::init(0).builder(DType::F32, &Device::Cpu);
///         let part = ModelPart::build(&mesh, &vb, 2, 16, |index, vb| {
///             Ok(match index {
///                 0 => layer_block(vocab_parallel_embedding(32, 16, &mesh.tp, vb.pp("tokens"))?),
///                 _ => head_block(vocab_parallel_head(32, 16, &mesh.tp, vb.pp("head"))?),
///             })
///         })?;
///         let mut training = Training::new(part, &mesh, Schedule::OneForwardOneBackward, AdamW::default())?;
///         let tokens = Tensor::arange(0u32, 32, &Device::Cpu)?.reshape((2, 16))?;
///         let batch = Pass::train(tokens.clone(), tokens);
///         let before = training.evaluate([Ok(batch.clone())])?.mean();
///         for _step in 0..10 {
///             training.step(&[batch.clone()], 1e-2, Some(1.0))?;
///         }
///         Ok((before, training.evaluate([Ok(batch)])?.mean()))
///     })?;
///     assert!(losses[1].1 < losses[1].0);
///     Ok(())
/// }
/// ```
pub struct Training {
    part: ModelPart,
    mesh: Mesh,
    pipeline: Pipeline,
    gradients: Gradients,
    optimizer: DistributedOptimizer,
}

impl Training {
    /// Trains `part` by `schedule` with `rule`. In f16 the loss has a [scale](LossScaling) that changes.
    ///
    /// # Errors
    /// As for [`DistributedOptimizer::new`].
    pub fn new(
        part: ModelPart,
        mesh: &Mesh,
        schedule: impl Instructions + 'static,
        rule: impl Optimizer + 'static,
    ) -> Result<Self> {
        let mut optimizer = DistributedOptimizer::new(part.params(), mesh, rule)?;
        if part.dtype() == DType::F16 {
            optimizer = optimizer.with_loss_scaling(LossScaling::default())?;
        }
        Ok(Self {
            pipeline: Pipeline::new(schedule, mesh),
            gradients: Gradients::new(part.params(), mesh)?,
            mesh: mesh.clone(),
            optimizer,
            part,
        })
    }

    /// A step: the gradient of the mean loss over the targets of the micro-batches of all replicas, clipped to the norm `max_norm`, and an
    /// update with the learning rate `lr`.
    ///
    /// # Errors
    /// As for [`Pipeline::forward_backward`] and [`DistributedOptimizer::step`].
    pub fn step(
        &mut self,
        micro_batches: &[Pass],
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<StepReport> {
        self.pass(micro_batches)?;
        self.optimizer.step(&mut self.gradients, lr, max_norm)
    }

    fn pass(&mut self, micro_batches: &[Pass]) -> Result<()> {
        self.gradients.set_loss_scale(self.optimizer.loss_scale());
        let passes = self
            .pipeline
            .forward_backward(&self.part, micro_batches, &mut self.gradients);
        passes.map(drop)
    }

    /// The gradients of such a step, for who wants to see them: [`Self::update`] takes them.
    ///
    /// # Errors
    /// As for [`Pipeline::forward_backward`] and [`Gradients::reduce`].
    pub fn gradients(&mut self, micro_batches: &[Pass]) -> Result<ReducedGradients> {
        self.pass(micro_batches)?;
        self.gradients.reduce()
    }

    /// The update from gradients.
    ///
    /// # Errors
    /// As for [`DistributedOptimizer::step_reduced`].
    pub fn update(
        &mut self,
        gradients: ReducedGradients,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<StepReport> {
        self.optimizer.step_reduced(gradients, lr, max_norm)
    }

    /// The losses of micro-batches, over all stages and replicas: the same on every rank.
    ///
    /// # Errors
    /// As for [`Pipeline::evaluate`].
    pub fn evaluate(
        &self,
        micro_batches: impl IntoIterator<Item = Result<Pass>>,
    ) -> Result<EvalSums> {
        let own = self.pipeline.evaluate(&self.part, micro_batches)?;
        own.of_all(&self.mesh)
    }

    /// Saves the model as a Hugging Face folder.
    ///
    /// # Errors
    /// As for [`DistributedOptimizer::save_hf`].
    pub fn save_hf(&self, save: &HfSave) -> Result<()> {
        self.optimizer.save_hf(save)
    }

    /// This rank's part of the model.
    pub fn part(&self) -> &ModelPart {
        &self.part
    }

    /// The optimizer: its state, the number of its updates.
    pub fn optimizer(&self) -> &DistributedOptimizer {
        &self.optimizer
    }

    /// The optimizer, to [load](crate::checkpoint::TrainingCheckpoint::load) into.
    pub fn optimizer_mut(&mut self) -> &mut DistributedOptimizer {
        &mut self.optimizer
    }
}
