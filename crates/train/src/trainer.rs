//! One train step for all layouts: schedule and tape, loss, gradients, optimizer.

use std::time::Instant;

use candle_comm::{Mesh, ReduceOp};
use candle_core::{Result, Tensor, bail};
use candle_parallel::{Gradients, MicroBatch, Optimizer, Pipeline, Stage};

use crate::batches::Batches;
use crate::memory_report::explain;
use crate::step_metrics::StepMetrics;
use crate::step_times::StepTimes;
use crate::train_config::TrainConfig;

/// Trains one rank's stage of a model, in step with the other ranks of the mesh.
pub struct Trainer {
    config: TrainConfig,
    mesh: Mesh,
    stage: Stage,
    pipeline: Pipeline,
    gradients: Gradients,
    optimizer: Optimizer,
    step: usize,
    times: StepTimes,
}

impl Trainer {
    /// A trainer at step 0. Every rank of the mesh makes one, with the same configuration.
    pub fn new(config: TrainConfig, mesh: &Mesh, stage: Stage) -> Result<Self> {
        config.validate()?;
        let gradients =
            Gradients::new(stage.params(), mesh).map_err(|err| explain(err, &stage, None, None))?;
        let optimizer = Optimizer::new(stage.params(), mesh, config.zero, config.adamw)
            .map_err(|err| explain(err, &stage, Some(&gradients), None))?;
        Ok(Self {
            pipeline: Pipeline::new(config.schedule, mesh.pp.clone()),
            gradients,
            optimizer,
            mesh: mesh.clone(),
            config,
            stage,
            step: 0,
            times: StepTimes::default(),
        })
    }

    /// Trains on `batches` up to the last step of the learning-rate schedule; `on_step` sees each step's numbers.
    pub fn train(
        &mut self,
        batches: &Batches,
        mut on_step: impl FnMut(&StepMetrics) -> Result<()>,
    ) -> Result<()> {
        while self.step < self.config.lr_schedule.num_steps {
            let metrics = self.train_step(&batches.batch(self.step)?)?;
            on_step(&metrics)?;
        }
        Ok(())
    }

    /// One optimizer step on this data-parallel rank's micro-batches.
    ///
    /// A loss or gradient that is NaN or infinite is an error on every rank, which names the step and the first parameter
    /// to blame; the weights are then those of the step before. An error of a GPU without memory tells what holds how much.
    pub fn train_step(&mut self, micro_batches: &[MicroBatch]) -> Result<StepMetrics> {
        let step = self.step;
        self.run_step(micro_batches)
            .map_err(|err| {
                explain(
                    err,
                    &self.stage,
                    Some(&self.gradients),
                    Some(&self.optimizer),
                )
            })
            .map_err(|err| err.context(format!("step {step} failed")))
    }

    fn run_step(&mut self, micro_batches: &[MicroBatch]) -> Result<StepMetrics> {
        let start = Instant::now();
        // What an earlier step that failed on the way has left.
        self.gradients.clear();
        let num_tokens = self.num_global_targets(micro_batches)?;
        let waited = candle_comm::waited();
        let passes = self.pipeline.forward_backward(
            &self.stage,
            micro_batches,
            num_tokens,
            &mut self.gradients,
        )?;
        let optimizer_timer = (Instant::now(), candle_comm::waited());
        // Every tensor-parallel rank of the last stage has the loss of its replica.
        let is_first_tp = self.mesh.tp.rank() == 0;
        let loss_sum = passes.loss_sum.filter(|_| is_first_tp);
        let (reduced, loss_sum) = self
            .optimizer
            .reduce_with_loss(&mut self.gradients, loss_sum.as_ref())?;
        let loss = loss_sum / num_tokens as f64;
        if !loss.is_finite() {
            let blame = self.optimizer.check_finite(&reduced);
            let message = format!("the loss is {loss}");
            return Err(match blame {
                Err(err) => err.context(message),
                Ok(()) => {
                    candle_core::Error::msg(format!("{message} though every gradient is finite"))
                }
            });
        }
        self.optimizer.check_finite(&reduced)?;
        let learning_rate = self.config.lr_schedule.at(self.step);
        self.optimizer
            .apply(&reduced, learning_rate, self.config.max_grad_norm)?;
        let (optimizer_start, optimizer_waited) = optimizer_timer;
        let in_optimizer = candle_comm::waited().saturating_sub(optimizer_waited);
        self.times = StepTimes {
            forward_secs: passes.forward_secs,
            backward_secs: passes.backward_secs,
            communication_secs: candle_comm::waited().saturating_sub(waited).as_secs_f64(),
            optimizer_secs: optimizer_start
                .elapsed()
                .saturating_sub(in_optimizer)
                .as_secs_f64(),
        };
        let step_secs = start.elapsed().as_secs_f64();
        let metrics = StepMetrics {
            step: self.step,
            loss,
            grad_norm: reduced.norm(),
            learning_rate,
            num_tokens,
            tokens_per_sec: num_tokens as f64 / step_secs,
            step_secs,
        };
        self.step += 1;
        Ok(metrics)
    }

    /// Valid targets of the whole global batch, counted before the forward pass: the loss is never a mean of means.
    fn num_global_targets(&self, micro_batches: &[MicroBatch]) -> Result<usize> {
        let counts = micro_batches.iter().map(MicroBatch::num_targets);
        let local: usize = counts.sum::<Result<usize>>()?;
        let is_alone = self.mesh.dp.world_size() == 1;
        if is_alone && local > 0 {
            return Ok(local);
        }
        let local = Tensor::new(&[local as i64], self.mesh.world.device())?;
        let global = self
            .mesh
            .dp
            .all_reduce(&local, ReduceOp::Sum)?
            .to_vec1::<i64>()?[0];
        match usize::try_from(global) {
            Ok(global) if global > 0 => Ok(global),
            _ => bail!("the global batch has {global} targets; expected at least one"),
        }
    }

    /// The step that comes next, from 0.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Where the time of the last step went on this rank.
    pub fn times(&self) -> StepTimes {
        self.times
    }

    /// This rank's part of the model.
    pub fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The optimizer, to read its state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }
}
