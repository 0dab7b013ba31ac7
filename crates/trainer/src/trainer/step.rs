//! One step, whether this rank's passes or workers compute its gradients.

use std::time::Instant;

use candle_comm::trace::{self, SpanKind};
use candle_core::{Result, bail};
use candle_ops::Stopwatch;
use candle_parallel::Pass;

use super::{GradientSource, Trainer};
use crate::logs::StepMetrics;
use crate::logs::StepTimes;
use crate::parameter_server::{ServedStep, StepDone};

impl Trainer {
    pub(super) fn run_step(&mut self, micro_batches: &[Pass]) -> Result<StepMetrics> {
        let start = Instant::now();
        let loss_scale = self.optimizer.loss_scale();
        let learning_rate = self.config.lr_schedule.at(self.step);
        let StepDone {
            report,
            num_positions,
            context,
            staleness,
        } = match &self.source {
            GradientSource::Passes(_) => self.step_of_passes(micro_batches)?,
            GradientSource::Workers(..) => self.step_of_workers()?,
        };
        self.is_stopped |= report.is_asked_to_stop;
        let step_secs = start.elapsed().as_secs_f64();
        let per_sec = num_positions as f64 / step_secs;
        let loss = report.loss;
        let metrics = StepMetrics {
            step: self.step,
            global_step: self.step + 1,
            epoch: None,
            loss: loss.mean,
            grad_norm: report.grad_norm,
            learning_rate,
            loss_scale,
            skipped_steps: self.optimizer.num_skipped_steps(),
            padding: 0.0,
            num_tokens: loss.num_targets,
            tokens_per_sec: loss.num_targets as f64 / step_secs,
            num_positions,
            positions_per_sec: per_sec,
            step_secs,
            gflops_per_sec: self.flops.map(|flops| flops.gflops_per_sec(per_sec)),
            mfu: self.flops.and_then(|flops| flops.mfu(per_sec)),
            pipeline: report.pipeline,
            context,
            staleness,
            reported: report.metrics,
            memory: self.memory(),
        };
        self.note_loss(&metrics);
        self.step += 1;
        Ok(metrics)
    }

    /// A step whose gradients the workers compute.
    fn step_of_workers(&mut self) -> Result<StepDone> {
        let asks_to_stop = self.asks_to_stop.as_ref().is_some_and(|asks| asks());
        let pauses_at = self.next_pause();
        let GradientSource::Workers(workers) = &mut self.source else {
            bail!("a step of workers without a server");
        };
        let (server, mesh) = &mut **workers;
        let step = ServedStep {
            step: self.step,
            lr: &self.config.lr_schedule,
            max_norm: self.config.max_grad_norm,
            mesh,
            asks_to_stop,
            pauses_at,
        };
        server.step((self.part.params(), &mut self.optimizer), &step)
    }

    /// A step whose gradients the passes of the mesh's ranks compute.
    fn step_of_passes(&mut self, micro_batches: &[Pass]) -> Result<StepDone> {
        let GradientSource::Passes(gradients) = &mut self.source else {
            bail!("a step of passes on a server");
        };
        gradients.set_loss_scale(self.optimizer.loss_scale());
        let waited = candle_comm::waited();
        let hidden = candle_comm::hidden();
        let passes = self
            .pipeline
            .forward_backward(&self.part, micro_batches, gradients)?;
        // As late as the others can still hear it with the losses.
        if self.asks_to_stop.as_ref().is_some_and(|asks| asks()) {
            gradients.ask_to_stop();
        }
        let optimizer_timer = (Instant::now(), candle_comm::waited());
        self.world.set_step(self.step, "optimizer");
        let mut stopwatch = self.stopwatch.is_some().then(Stopwatch::default);
        let learning_rate = self.config.lr_schedule.at(self.step);
        let device = self.world.device();
        let mut update = || {
            trace::record(SpanKind::Optimizer, device, || {
                self.optimizer
                    .step(gradients, learning_rate, self.config.max_grad_norm)
            })
        };
        let report = match &mut stopwatch {
            Some(stopwatch) => stopwatch.time(device, update)?,
            None => update()?,
        };
        let (optimizer_start, optimizer_waited) = optimizer_timer;
        let in_optimizer = candle_comm::waited().saturating_sub(optimizer_waited);
        self.times = StepTimes {
            forward_secs: passes.forward_secs,
            backward_secs: passes.backward_secs,
            communication_secs: candle_comm::waited().saturating_sub(waited).as_secs_f64(),
            hidden_communication_secs: candle_comm::hidden().saturating_sub(hidden).as_secs_f64(),
            optimizer_secs: optimizer_start
                .elapsed()
                .saturating_sub(in_optimizer)
                .as_secs_f64(),
        };
        if let (Some(stopwatch), Some(earlier)) = (stopwatch, &mut self.stopwatch) {
            [self.times.forward_secs, self.times.backward_secs] =
                self.pipeline.take_device_secs()?;
            // The end of this update is not waited for.
            self.times.optimizer_secs = std::mem::replace(earlier, stopwatch).take_secs()?;
        }
        self.debug.tell(self.step + 1, &self.times);
        Ok(StepDone {
            report,
            num_positions: self.num_positions(micro_batches),
            context: passes.context,
            staleness: None,
        })
    }

    /// The next step before which the weights are saved or evaluated, but for the end.
    fn next_pause(&self) -> usize {
        let of_checkpoint = self.checkpoints.as_ref().and_then(|it| it.every);
        let of_evaluation = self.evaluation.as_ref().and_then(|it| it.every);
        let all = of_checkpoint.into_iter().chain(of_evaluation);
        let next = all.map(|every| (self.step + 1).next_multiple_of(every));
        let next = next.filter(|step| *step < self.num_steps()).min();
        next.unwrap_or(usize::MAX)
    }

    /// Positions of the global batch, whether they are targets or not, if all replicas have as many as this one; of inputs that are
    /// no ids, samples.
    fn num_positions(&self, micro_batches: &[Pass]) -> usize {
        let positions = micro_batches.iter().map(|batch| {
            let inputs = batch.inputs();
            match inputs.dtype().is_int() {
                true => inputs.elem_count(),
                false => inputs.dims().first().copied().unwrap_or(1),
            }
        });
        self.num_replicas * positions.sum::<usize>()
    }
}
