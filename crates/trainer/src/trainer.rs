//! One train step for all layouts: schedule and tape, loss, gradients, optimizer.

mod evaluate;
mod step;

use candle_comm::trace::{self, SpanKind};
use candle_comm::{Mesh, ProcessGroup, message_of};
use candle_core::{DType, Error, Result, bail};
use candle_data::{DataPosition, TrainingData};
use candle_ops::Stopwatch;
use candle_parallel::checkpoint::{HfSave, SaveOutcome, TrainingCheckpoint};
use candle_parallel::{
    AdamW, DistributedOptimizer, Gradients, Instruction, Instructions, MemoryReport, ModelPart,
    Parameters, Pass, Pipeline, PipelineLayout, Schedule, gather,
};

use crate::checkpoints::{Checkpoints, RunState};
use crate::evaluation::{EvalHistory, EvalMetrics, Evaluation};
use crate::logs::step_debug::StepDebug;
use crate::logs::{ModelFlops, StepMetrics, StepTimes};
use crate::loss_range::{LossChange, LossRange};
use crate::memory::memory_report::explain;
use crate::parameter_server::ParameterServer;
use crate::train_config::TrainConfig;

/// What happens while a trainer trains.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TrainEvent<'a> {
    /// A step was done.
    Step(&'a StepMetrics),
    /// Something begins that takes a while, until the next event or the end.
    Begin(&'static str),
    /// The weights after the step before were evaluated.
    Evaluation(&'a EvalMetrics),
}

/// Whether it has saved the model.
type SavesAtEnd = Box<dyn FnOnce(&Trainer) -> Result<bool> + Send>;

/// Trains one rank's stage of a model, in step with the other ranks of the mesh.
pub struct Trainer {
    config: TrainConfig,
    world: ProcessGroup,
    mesh: Mesh,
    part: ModelPart,
    pipeline: Pipeline,
    source: GradientSource,
    optimizer: DistributedOptimizer,
    step: usize,
    /// Where it went on from a checkpoint.
    resumed_at: Option<usize>,
    /// Steps of the run that it went on from, whose batches are left out of the data.
    num_to_skip: usize,
    times: StepTimes,
    debug: StepDebug,
    /// Of the optimizer on the device, if steps are timed there.
    stopwatch: Option<Stopwatch>,
    /// Whether this rank asks to stop.
    asks_to_stop: Option<Box<dyn Fn() -> bool + Send>>,
    is_stopped: bool,
    checkpoints: Option<Checkpoints>,
    saves_at_end: Option<SavesAtEnd>,
    has_saved_at_end: bool,
    losses: LossRange,
    num_replicas: usize,
    flops: Option<ModelFlops>,
    evaluation: Option<Evaluation>,
}

/// Where gradients come from.
enum GradientSource {
    /// Passes of this rank and the others of the mesh.
    Passes(Box<Gradients>),
    /// Workers, of which this rank is a server.
    Workers(Box<(ParameterServer, Mesh)>),
}

/// A schedule for steps of which some may have few micro-batches, such as the last one of an epoch.
struct OfEachStep(Schedule);

impl Instructions for OfEachStep {
    fn of_rank(
        &self,
        layout: &PipelineLayout,
        rank: usize,
        num_micro_batches: usize,
    ) -> Result<Vec<Instruction>> {
        let schedule = match self.0 {
            // It needs two micro-batches for each rank. ZBV has its stages where it has them, takes any number, and gives the same bits.
            Schedule::DualPipeV if num_micro_batches < 2 * layout.num_ranks() => {
                Schedule::ZeroBubbleV
            }
            schedule => schedule,
        };
        schedule.of_rank(layout, rank, num_micro_batches)
    }

    fn holds_little(&self) -> bool {
        self.0.holds_little()
    }
}

impl Trainer {
    /// A trainer at step 0. Every rank of the mesh makes one, with the same configuration.
    ///
    /// # Errors
    /// A field of the configuration out of its range, and what ranks say differently of the model.
    pub fn new(config: TrainConfig, mesh: &Mesh, part: ModelPart) -> Result<Self> {
        let rule = AdamW(config.adamw);
        Self::with_optimizer(config, mesh, part, |params| {
            DistributedOptimizer::new(params, mesh, rule)
        })
    }

    /// As [`Self::new`], with the optimizer that `make` builds in place of AdamW with the configuration's constants: one
    /// with another rule, with parameter groups, or with state that was saved. In f16 one without a loss scale gets the
    /// configuration's.
    ///
    /// # Errors
    /// As for [`Self::new`], and an error of `make`.
    pub fn with_optimizer(
        config: TrainConfig,
        mesh: &Mesh,
        part: ModelPart,
        make: impl FnOnce(&Parameters) -> Result<DistributedOptimizer>,
    ) -> Result<Self> {
        let gradients = Gradients::new(part.params(), mesh).map_err(|err| explain(err, &part))?;
        let source = GradientSource::Passes(Box::new(gradients));
        Self::with_source(config, mesh, part, (make, source))
    }

    /// As [`Self::new`], on a mesh of servers, which are replicas that see no data: the gradients come from the workers of `server`, and
    /// the weights go to them. Batches tell it the position in the data.
    ///
    /// # Errors
    /// An asynchronous server with a loss scale, which its workers would not agree about.
    pub fn of_server(
        config: TrainConfig,
        mesh: &Mesh,
        part: ModelPart,
        server: ParameterServer,
    ) -> Result<Self> {
        server.bound_messages(part.params())?;
        if part.dtype() == DType::F16 && server.is_asynchronous() {
            bail!(
                "f16 needs a loss scale that all workers have in a step, and an asynchronous parameter server has no steps of all \
                 workers\nhint: use bf16 or f32, or a synchronous one"
            );
        }
        let constants = match server.is_asynchronous() {
            true => (config.adamw).scaled_to_batches(1.0 / server.num_workers() as f64),
            false => config.adamw,
        };
        let rule = AdamW(constants);
        let make = |params: &Parameters| DistributedOptimizer::new(params, mesh, rule);
        let source = GradientSource::Workers(Box::new((server, mesh.clone())));
        Self::with_source(config, mesh, part, (make, source))
    }

    fn with_source(
        config: TrainConfig,
        mesh: &Mesh,
        part: ModelPart,
        (make, source): (
            impl FnOnce(&Parameters) -> Result<DistributedOptimizer>,
            GradientSource,
        ),
    ) -> Result<Self> {
        config.validate()?;
        let mut optimizer = make(part.params()).map_err(|err| explain(err, &part))?;
        if part.dtype() == DType::F16 && !optimizer.has_loss_scaling() {
            optimizer = optimizer.with_loss_scaling(config.loss_scaling)?;
        }
        let blocks: Vec<usize> = part.block_indices().collect();
        tracing::debug!(
            "rank {}: stage {} of {}, replica {} of {}, tensor-parallel part {} of {}, context-parallel part {} of {}; blocks {blocks:?}, {} parameters in {} buckets",
            mesh.world.rank(),
            mesh.pp.rank(),
            mesh.pp.world_size(),
            mesh.dp.rank(),
            mesh.dp.world_size(),
            mesh.tp.rank(),
            mesh.tp.world_size(),
            mesh.cp.rank(),
            mesh.cp.world_size(),
            part.params().len(),
            part.params().num_buckets()
        );
        Ok(Self {
            debug: StepDebug::of(mesh),
            pipeline: Pipeline::new(OfEachStep(config.schedule), mesh)
                .with_prefetch(config.pipeline_prefetch),
            source,
            optimizer,
            world: mesh.world.clone(),
            mesh: mesh.clone(),
            config,
            part,
            step: 0,
            resumed_at: None,
            num_to_skip: 0,
            times: StepTimes::default(),
            stopwatch: None,
            asks_to_stop: None,
            is_stopped: false,
            checkpoints: None,
            saves_at_end: None,
            has_saved_at_end: false,
            losses: LossRange::default(),
            num_replicas: mesh.dp.world_size(),
            flops: None,
            evaluation: None,
        })
    }

    /// Asks `asks` in each step whether this rank wants to stop. If that of any rank does, [`Self::train`] returns after that step on all
    /// of them: they tell each other with the sum of the losses.
    pub fn with_stop(mut self, asks: impl Fn() -> bool + Send + 'static) -> Self {
        self.asks_to_stop = Some(Box::new(asks));
        self
    }

    /// Whether [`Self::train`] has returned before the last step because a rank asked it to: the same on every rank.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped && self.step < self.config.lr_schedule.num_steps
    }

    /// Tells in the metrics from now on how much of the model's arithmetic is done per second.
    pub fn with_flops(mut self, flops: ModelFlops) -> Self {
        self.flops = Some(flops);
        self
    }

    /// Says on rank 0 when a loss leaves or comes back to this range, from now on; without this, to the default one.
    pub fn with_loss_range(mut self, range: LossRange) -> Self {
        self.losses = range;
        self
    }

    /// Whether a loss or gradients that are no numbers, or a loss out of a [range](LossRange) that stops, have ended [`Self::train`]: the
    /// same on every rank.
    pub fn has_diverged(&self) -> bool {
        self.optimizer.has_diverged()
    }

    /// Saves checkpoints between the steps of [`Self::train`] from now on.
    pub fn with_checkpoints(mut self, checkpoints: Checkpoints) -> Self {
        self.checkpoints = Some(checkpoints);
        self
    }

    /// Calls `save` on every rank as soon as the last step is done, before the last evaluation: what fails after it loses no trained model. It
    /// tells whether it saved it, the same on every rank; its error is that of [`Self::train`], when evaluation and checkpoint are done.
    pub fn with_save_at_end(
        mut self,
        save: impl FnOnce(&Self) -> Result<bool> + Send + 'static,
    ) -> Self {
        self.saves_at_end = Some(Box::new(save));
        self
    }

    /// Whether what [`Self::with_save_at_end`] was given has saved the model: the same on every rank.
    pub fn has_saved_at_end(&self) -> bool {
        self.has_saved_at_end
    }

    /// Evaluates between the steps of [`Self::train`] from now on, before a checkpoint that is due then. Every rank must be told the same.
    pub fn with_evaluation(mut self, evaluation: Evaluation) -> Self {
        self.evaluation = Some(evaluation);
        self
    }

    /// What evaluations gave so far; `None` without them.
    pub fn evaluations(&self) -> Option<EvalHistory> {
        self.evaluation
            .as_ref()
            .map(|evaluation| evaluation.history)
    }

    /// Whether evaluations have ended [`Self::train`] before the last step: see [`Evaluation::with_patience`].
    pub fn is_stopped_early(&self) -> bool {
        let evaluation = self.evaluation.as_ref();
        evaluation.is_some_and(Evaluation::is_out_of_patience) && self.step < self.num_steps()
    }

    /// Goes on where a run was, of this or another layout, when it saved `checkpoint`: weights, optimizer, loss scale and step. Where it
    /// was in the data [`Batches::continued`](crate::Batches::continued) takes; of an iterator [`Self::train`] leaves out as many items. Every rank must call it, before the first step.
    ///
    /// # Errors
    /// A checkpoint of another model or optimizer.
    pub fn resume(&mut self, checkpoint: &TrainingCheckpoint) -> Result<()> {
        checkpoint.load(&mut self.optimizer)?;
        self.step = checkpoint.step();
        self.resumed_at = Some(self.step);
        self.num_to_skip = self.step;
        Ok(())
    }

    /// Times the parts of steps on the device from now on: on a GPU [`Self::times`] are those of its own clock. The optimizer's,
    /// whose end nobody waits for, is then that of the step before.
    pub fn with_device_times(mut self) -> Self {
        self.pipeline = self.pipeline.with_device_times();
        self.stopwatch = Some(Stopwatch::default());
        self
    }

    /// Trains on `data` up to the last step of the learning-rate schedule, or until a rank [asks to stop](Self::with_stop) or
    /// [evaluations](Self::with_evaluation) do; `on_step` sees each step's numbers, before a checkpoint of it is saved. `data` is
    /// `&Batches`, or any iterator whose items are the micro-batches of a step: of a run that was [resumed](Self::resume) the same
    /// one from its beginning.
    ///
    /// # Errors
    /// Those of [`Self::train_step`], of the data and of `on_step`, and data that ends before the last step.
    pub fn train(
        &mut self,
        data: impl TrainingData,
        mut on_step: impl FnMut(&StepMetrics) -> Result<()>,
    ) -> Result<()> {
        self.train_observed(data, |event| match event {
            TrainEvent::Step(metrics) => on_step(metrics),
            TrainEvent::Begin(_) | TrainEvent::Evaluation(_) => Ok(()),
        })
    }

    /// As [`Self::train`]; `observe` sees the numbers of evaluations, too.
    ///
    /// # Errors
    /// As for [`Self::train`].
    pub fn train_observed(
        &mut self,
        mut data: impl TrainingData,
        mut observe: impl FnMut(TrainEvent) -> Result<()>,
    ) -> Result<()> {
        let num_steps = self.num_steps();
        if matches!(self.source, GradientSource::Workers(_)) && !data.counts_samples() {
            bail!(
                "the data of a parameter server are not Batches; expected those of which its workers have their parts, as \
                 they are told a place in them"
            );
        }
        data.skip_steps(std::mem::take(&mut self.num_to_skip))?;
        if let GradientSource::Workers(workers) = &mut self.source {
            let position = match self.step {
                0 => None,
                step => Some(data.position(step)?.total),
            };
            let own = (self.part.params(), &self.optimizer);
            workers.0.admit(own, (self.step, num_steps), position)?;
        }
        if num_steps == 0 {
            self.evaluate_observed(&data, &mut observe)?;
        }
        let mut saved = Ok(false);
        while self.step < num_steps && !self.is_stopped && !self.is_stopped_early() {
            self.world.set_step(self.step, "data");
            let device = self.world.device();
            let batch = match &self.source {
                GradientSource::Passes(_) => {
                    let batch = trace::record(SpanKind::Data, device, || data.batch(self.step))?;
                    // Batches of samples are as many on every rank; iterators may end on one alone.
                    if !data.counts_samples() {
                        self.check_has_data(batch.is_some())?;
                    }
                    batch.ok_or_else(|| self.out_of_data(""))?
                }
                GradientSource::Workers(..) => Vec::new(),
            };
            let position = data.position(self.step)?;
            let metrics = self.train_step(&batch);
            let mut metrics = metrics.map_err(|err| self.after_failed_step(err, position))?;
            metrics.epoch = data.epoch(metrics.global_step)?;
            if let Some(filling) = data.filling(metrics.step)? {
                metrics.padding = filling.padding();
                if let GradientSource::Passes(_) = &self.source {
                    metrics.num_positions = filling.num_positions;
                    metrics.positions_per_sec = filling.num_positions as f64 / metrics.step_secs;
                }
            }
            let position = data.position(self.step)?;
            observe(TrainEvent::Step(&metrics))?;
            if self.losses.stops && self.has_left_range()? {
                self.optimizer.set_diverged();
                return Err(self.after_failed_step(self.out_of_range(&metrics), position));
            }
            if self.step == num_steps
                && let Some(save) = self.saves_at_end.take()
            {
                observe(TrainEvent::Begin("saving the model"))?;
                self.world.set_step(self.step, "saving the model");
                saved = save(self);
                self.has_saved_at_end = saved.as_ref().is_ok_and(|is_saved| *is_saved);
            }
            let evaluation = self.evaluation.as_ref();
            if evaluation.is_some_and(|it| it.is_due(self.step, num_steps)) {
                observe(TrainEvent::Begin("evaluating"))?;
                let evaluated = self.evaluate_observed(&data, &mut observe);
                evaluated.map_err(|err| match &saved {
                    Ok(_) => err,
                    // Which says where the model is rescued.
                    Err(why) => err.context(message_of(why)),
                })?;
            }
            self.checkpoint(position)?;
        }
        if let Some(checkpoints) = &mut self.checkpoints {
            observe(TrainEvent::Begin("writing the checkpoint"))?;
            checkpoints.end(&self.losses.history)?;
        }
        saved.map(|_| ())
    }

    /// Evaluates, and has that observed.
    fn evaluate_observed(
        &mut self,
        data: &impl TrainingData,
        observe: &mut impl FnMut(TrainEvent) -> Result<()>,
    ) -> Result<()> {
        let Some(mut metrics) = self.evaluate()? else {
            return Ok(());
        };
        metrics.epoch = data.epoch(self.step)?;
        observe(TrainEvent::Evaluation(&metrics))
    }

    /// The error of a step. If training has diverged all ranks know it, and none is lost: the weights as they were then are saved and
    /// named, apart from the checkpoints that a run goes on from.
    fn after_failed_step(&mut self, err: Error, position: DataPosition) -> Error {
        let has_begun = self.step > self.resumed_at.unwrap_or(0);
        if !self.optimizer.has_diverged() || !has_begun {
            return err;
        }
        let said = match self.save_failed(position) {
            Ok(None) => return err,
            Ok(Some(said)) => said,
            Err(why) => format!(
                "the run as it was then could not be saved: {}",
                message_of(&why)
            ),
        };
        Error::msg(format!("{}\n{said}", message_of(&err)))
    }

    /// Sets aside what the run has ruined, with a checkpoint of it as it is; says where that is, and what there is from before. `None` without
    /// checkpoints.
    fn save_failed(&mut self, position: DataPosition) -> Result<Option<String>> {
        // With these weights the loss was out of its range for the first time, or no number. If they are those of the checkpoint that the
        // run went on from, other data or other flags may be to blame.
        let first = self.losses.history.left_at().unwrap_or(self.step);
        let first = match self.resumed_at == Some(first) {
            true => first + 1,
            false => first,
        };
        let saved = self.on_checkpoints(position, |checkpoints, run| {
            checkpoints.save_failed(run, first)
        });
        let Some((outcome, set_aside)) = saved? else {
            return Ok(None);
        };
        let mut said = Vec::new();
        match (set_aside.failed.first(), outcome.map(|it| it.saved)) {
            (Some(path), Some(Ok(_))) => {
                said.push(format!(
                    "hint: {} has the run as it was then",
                    path.display()
                ));
            }
            (_, Some(Err(why))) => {
                said.push(format!("the run as it was then could not be saved: {why}"));
            }
            _ => {}
        }
        said.push(match &set_aside.newest {
            Some(path) => format!(
                "hint: the newest checkpoint from before is {}",
                path.display()
            ),
            None => "hint: there is no checkpoint from before".to_string(),
        });
        Ok(Some(said.join("\n")))
    }

    /// Whether the loss has left its range: of asynchronous servers, whose losses are of different pushes, that of any.
    fn has_left_range(&self) -> Result<bool> {
        let own = self.losses.history.left_at().is_some();
        match self.source {
            GradientSource::Passes(_) => Ok(own),
            GradientSource::Workers(..) => {
                let all = self.world.all_gather_bytes(&[u8::from(own)])?;
                Ok(all.iter().any(|own| *own == [1]))
            }
        }
    }

    /// An error on every rank that names the ranks whose data ends before the training does. Every rank must call it.
    fn check_has_data(&self, has_data: bool) -> Result<()> {
        let all = self.world.all_gather_bytes(&[u8::from(has_data)])?;
        let without: Vec<usize> = (0..all.len()).filter(|&rank| all[rank] == [0]).collect();
        match without.len() {
            0 => Ok(()),
            num if num == all.len() => Err(self.out_of_data("")),
            _ => Err(self.out_of_data(&format!(" of some ranks, {without:?},"))),
        }
    }

    /// The error of data that ends before the training does.
    fn out_of_data(&self, of_whom: &str) -> Error {
        Error::msg(format!(
            "the data{of_whom} ends after {} of {} steps\nhint: an iterator that begins again, such as by cycle(), or fewer steps in the learning-rate \
             schedule",
            self.step,
            self.num_steps()
        ))
    }

    /// The error of a step whose loss has left its range.
    fn out_of_range(&self, metrics: &StepMetrics) -> Error {
        Error::msg(format!(
            "the loss of step {} is {:.4}, more than {} times the median of the steps before: the training is stopped\nhint: a lower learning \
             rate or a longer warm-up, or look at the data of this step",
            metrics.global_step, metrics.loss, self.losses.max_ratio
        ))
    }

    /// Notes the loss of a step, and says so where it leaves its range or comes back.
    fn note_loss(&mut self, metrics: &StepMetrics) {
        let change = self.losses.note(metrics.step, metrics.loss);
        let Some(change) = change.filter(|_| self.world.rank() == 0) else {
            return;
        };
        let (step, loss) = (metrics.global_step, metrics.loss);
        match change {
            LossChange::Left { median } => tracing::warn!(
                "the loss of step {step} is {loss:.4}, more than {} times {median:.4}, the median of the steps before{}",
                self.losses.max_ratio,
                match &self.checkpoints {
                    Some(_) =>
                        ": the newest checkpoint from before that step is kept until it is back",
                    None => "",
                }
            ),
            LossChange::CameBack => {
                tracing::info!("the loss of step {step} is {loss:.4}: back in its usual range");
            }
        }
    }

    /// Saves if it is time to, or looks how an earlier save ended; `position` is the next step's place in the data. [`Self::train`] does it after each step; with a loop of your own every
    /// rank calls it there.
    ///
    /// # Errors
    /// Failures of ranks. A save that fails is a warning.
    pub fn checkpoint(&mut self, position: DataPosition) -> Result<()> {
        let device = self.world.device().clone();
        let done = self.on_checkpoints(position, |checkpoints, run| {
            trace::record(SpanKind::Checkpoint, &device, || {
                checkpoints.after_step(run)
            })
        });
        done.map(|_| ())
    }

    /// What `act` does with the checkpoints and the run as it is; `None` without checkpoints.
    fn on_checkpoints<T>(
        &mut self,
        position: DataPosition,
        act: impl FnOnce(&mut Checkpoints, RunState) -> Result<T>,
    ) -> Result<Option<T>> {
        let repeats_gradients = match &self.source {
            GradientSource::Passes(_) => false,
            GradientSource::Workers(workers) => workers.0.is_within_steps(),
        };
        let Some(checkpoints) = &mut self.checkpoints else {
            return Ok(None);
        };
        let run = RunState {
            optimizer: &self.optimizer,
            step: self.step,
            position,
            losses: &self.losses.history,
            repeats_gradients,
        };
        act(checkpoints, run).map(Some)
    }

    /// Saves a checkpoint at once, whatever the step, with the next step's place in the data, and waits until it is written: how that ended, or `None` without
    /// [`Self::with_checkpoints`]. Every rank must call it, between steps.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn save_checkpoint(&mut self, position: DataPosition) -> Result<Option<SaveOutcome>> {
        let saved = self.on_checkpoints(position, |checkpoints, run| checkpoints.save_now(run));
        saved.map(Option::flatten)
    }

    /// How many checkpoints could not be saved, if none could: the same on every rank.
    pub fn num_checkpoints_failed(&self) -> usize {
        let checkpoints = self.checkpoints.as_ref();
        checkpoints.map_or(0, Checkpoints::num_failed_of_all)
    }

    /// One optimizer step on this data-parallel rank's micro-batches.
    ///
    /// A loss or gradient that is NaN or infinite is an error on every rank, which names the step and the first parameter
    /// to blame; the weights are then those of the step before, on asynchronous servers with the step's other gradients. In f16 the update is skipped instead while the loss scale
    /// can be halved: the next step takes the next micro-batches and their learning rate. An error of a GPU without memory tells what holds how much.
    ///
    /// # Errors
    /// See above; and micro-batches that do not fit the model, and what ends collectives.
    pub fn train_step(&mut self, micro_batches: &[Pass]) -> Result<StepMetrics> {
        let step = self.step;
        self.world.set_step(step, "forward and backward pass");
        let device = self.world.device().clone();
        trace::record(SpanKind::Step, &device, || self.run_step(micro_batches))
            .map_err(|err| explain(err, &self.part))
            .map_err(|err| err.context(format!("step {} failed", step + 1)))
    }

    /// Saves the model as [`DistributedOptimizer::save_hf`] does. Every rank must call it.
    ///
    /// # Errors
    /// As for [`DistributedOptimizer::save_hf`].
    pub fn save_hf(&self, save: &HfSave) -> Result<()> {
        self.optimizer.save_hf(save)
    }

    /// The step that comes next, from 0.
    pub fn step(&self) -> usize {
        self.step
    }

    /// Number of steps of the whole run.
    pub fn num_steps(&self) -> usize {
        self.config.lr_schedule.num_steps
    }

    /// Where the time of the last step went on this rank.
    pub fn times(&self) -> StepTimes {
        self.times
    }

    /// The bytes that this rank holds, by what they are for.
    pub fn memory(&self) -> MemoryReport {
        self.part.params().meter().report()
    }

    /// The most bytes of each category in what the ranks say of theirs, as [`Self::memory`]. Every rank must call it.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn memory_of_largest_rank(&self, own: MemoryReport) -> Result<MemoryReport> {
        let all: Vec<MemoryReport> = gather(&self.world, &own)?;
        Ok(all
            .iter()
            .fold(own, |largest, of_rank| largest.max(of_rank)))
    }

    /// This rank's part of the model.
    pub fn part(&self) -> &ModelPart {
        &self.part
    }

    /// The optimizer, to read its state.
    pub fn optimizer(&self) -> &DistributedOptimizer {
        &self.optimizer
    }
}
