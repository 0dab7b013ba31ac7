//! Runs a schedule: the one train-step engine of every layout.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use candle_comm::trace::{self, SpanKind};
use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Result, bail};
use candle_ops::Stopwatch;

use super::channels::Channels;
use super::executor::Executor;
use super::input_check::{HowRun, InputCheck};
use super::units::Units;
use crate::gradients::Gradients;
use crate::pass::{ContextRank, Occupation, Pass, PassReport};
use crate::pipeline::ModelPart;
use crate::pipeline_layout::PipelineLayout;
use crate::program::{Lowering, Passes, Program, Setup};
use crate::schedule::{Instruction, Instructions, Plan};

/// Interprets a [schedule](Instructions) over the ranks of a pipeline group. Without a pipeline the group has one rank.
pub struct Pipeline {
    schedule: Box<dyn Instructions>,
    pub(super) pp: ProcessGroup,
    pub(super) cp: ProcessGroup,
    /// Compares what the ranks of a replica are given.
    pub(super) input_check: Option<InputCheck>,
    /// Stopwatches of forward, backward and all passes, if they are timed on the device.
    stopwatches: Option<[Mutex<Stopwatch>; 3]>,
    /// The occupation that they measured last.
    occupation: Mutex<Option<Occupation>>,
    /// Whether a batch was evaluated twice, to see that it gives the same.
    pub(super) evaluates_alike: AtomicBool,
    /// Made for the first model part that is run.
    channels: OnceLock<Channels>,
    /// Receives that are posted ahead.
    prefetch: usize,
    /// The schedule's lists for the number of micro-batches that there were last; they depend on nothing else.
    plan: Mutex<Option<Arc<Plan>>>,
}

/// Places of the stopwatches.
pub(super) const FORWARD: usize = 0;
pub(super) const BACKWARD: usize = 1;
const ALL_PASSES: usize = 2;

impl Pipeline {
    /// A pipeline over the ranks of `mesh.pp`.
    pub fn new(schedule: impl Instructions + 'static, mesh: &Mesh) -> Self {
        Self {
            schedule: Box::new(schedule),
            pp: mesh.pp.clone(),
            cp: mesh.cp.clone(),
            input_check: InputCheck::new(mesh),
            stopwatches: None,
            occupation: Mutex::new(None),
            evaluates_alike: AtomicBool::new(false),
            channels: OnceLock::new(),
            prefetch: 1,
            plan: Mutex::new(None),
        }
    }

    /// Posts up to `num` receives (1 without this) beside that of the unit which is next: what they are for comes while others are computed, and each
    /// takes the memory of a message.
    pub fn with_prefetch(self, num: usize) -> Self {
        Self {
            prefetch: num,
            plan: Mutex::default(),
            ..self
        }
    }

    /// Times passes on the rank's device from now on: see [`Self::take_device_secs`].
    pub fn with_device_times(mut self) -> Self {
        self.stopwatches = Some(Default::default());
        self
    }

    /// The seconds that forward and backward passes took on the device since this was last asked; waits for their end. Zeros
    /// without [`Self::with_device_times`].
    ///
    /// # Errors
    /// The device has failed.
    pub fn take_device_secs(&self) -> Result<[f64; 2]> {
        let Some(stopwatches) = &self.stopwatches else {
            return Ok([0.0; 2]);
        };
        let take = |stopwatch: &Mutex<Stopwatch>| {
            let mut stopwatch = stopwatch.lock().unwrap_or_else(PoisonError::into_inner);
            stopwatch.take_secs()
        };
        let [forward, backward] = [take(&stopwatches[FORWARD])?, take(&stopwatches[BACKWARD])?];
        *self.occupation() = Some(Occupation {
            busy: forward + backward,
            whole: take(&stopwatches[ALL_PASSES])?,
        });
        Ok([forward, backward])
    }

    fn occupation(&self) -> MutexGuard<'_, Option<Occupation>> {
        self.occupation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// `pass` is the place of a stopwatch.
    pub(super) fn timed<T>(
        &self,
        pass: usize,
        kind: SpanKind,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        trace::record(kind, self.pp.device(), || self.by_stopwatch(pass, work))
    }

    fn by_stopwatch<T>(&self, place: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(stopwatches) = &self.stopwatches else {
            return work();
        };
        let stopwatch = stopwatches[place].lock();
        let mut stopwatch = stopwatch.unwrap_or_else(PoisonError::into_inner);
        stopwatch.time(self.pp.device(), work)
    }

    /// The ways between the ranks of the pipeline, which all of them must ask for.
    pub(super) fn channels(&self, part: &ModelPart) -> Result<&Channels> {
        let layout = part.layout();
        if let Some(channels) = self.channels.get() {
            if channels.layout != *layout {
                bail!(
                    "a pipeline runs models whose stages lie alike\nhint: make another Pipeline for the second model"
                );
            }
            return Ok(channels);
        }
        let made = Channels::new(&self.pp, layout, part.params().meter())?;
        Ok(self.channels.get_or_init(|| made))
    }

    /// Forward and backward passes of all micro-batches of a step: adds to `gradients` those of the sum of the losses over
    /// this replica's targets, times [`Gradients::loss_scale`]. [`Gradients::reduce`] makes them those of the mean over the global batch.
    ///
    /// Every rank of a replica, whatever its stages, must be given the same micro-batches. A step may have several calls, whose losses,
    /// targets and gradients add up; with replicas each call sums over them, unless
    /// [`DataParallel::overlap`](crate::DataParallel::overlap) is off.
    ///
    /// # Errors
    /// Ranks of a replica that were given different micro-batches, with ZeRO-2 and 3 replicas that were given unequal numbers of
    /// them, gradients of another model, a schedule that leaves something out, and what blocks return. After an error `gradients` have nothing
    /// of the step: it begins anew.
    pub fn forward_backward(
        &self,
        part: &ModelPart,
        micro_batches: &[Pass],
        gradients: &mut Gradients,
    ) -> Result<PassReport> {
        gradients.check_are_of(part.params())?;
        let report = self.run_passes(part, micro_batches, gradients);
        if report.is_err() {
            gradients.clear();
        }
        report
    }

    fn run_passes(
        &self,
        part: &ModelPart,
        micro_batches: &[Pass],
        gradients: &mut Gradients,
    ) -> Result<PassReport> {
        let params = part.params();
        self.channels(part)?.check()?;
        check_have_rows(micro_batches)?;
        let plan = self.plan(part.layout(), micro_batches.len());
        let known = plan.as_ref().ok();
        let program = known.map(|plan| self.program(part, plan, gradients));
        let mut compared = Ok(());
        if let Some(check) = &self.input_check {
            let counts_are_equal = params.groups().moves_in_passes(true);
            let how = HowRun {
                schedule: known.map_or(0, |plan| plan.condensed()),
                collectives: (program.as_ref().and_then(|program| program.as_ref().ok()))
                    .map_or(0, |program| program.condensed()),
                recompute: part.recompute,
            };
            compared = check.run(micro_batches, how, counts_are_equal);
        }
        // An error of this rank comes before what the others see of it.
        let program = program.transpose()?.unwrap_or_default();
        compared?;
        let plan = plan?;
        let start = Instant::now();
        gradients.begin_passes()?;
        part.begin();
        let _in_passes = params.packed().in_passes();
        params.meter().begin_passes(part.device())?;
        let step = params.num_updates().load(Ordering::Relaxed);
        let (scale, seed) = (gradients.loss_scale(), params.seed());
        let passes = micro_batches.iter();
        let training = |pass: &Pass| pass.training(scale, step, seed, &part.region);
        let passes = passes.map(|pass| training(pass).cut(&self.cp));
        let passes: Vec<Pass> = passes.collect::<Result<_>>()?;
        let early = plan.early(gradients.come_once());
        let mut executor = Executor {
            units: Some(Units::new(self, part, &passes, early, None)?),
            gradients: Some(&mut *gradients),
            ..Executor::new(params)
        };
        self.by_stopwatch(ALL_PASSES, || executor.run(&program))?;
        let units = executor.units.take();
        let mut report = units.map(Units::finish).transpose()?.unwrap_or_default();
        report.passes_secs = start.elapsed().as_secs_f64();
        report.context = work_of_ranks(&passes)?;
        report.occupation = if part.device().is_cpu() {
            Some(Occupation {
                busy: report.forward_secs + report.backward_secs,
                whole: report.passes_secs,
            })
        } else {
            self.occupation().take()
        };
        params.meter().end_passes(part.device())?;
        gradients.add_passes(&report)?;
        Ok(report)
    }

    /// The lists of all ranks for so many micro-batches, which were checked.
    fn plan(&self, layout: &PipelineLayout, num_micro_batches: usize) -> Result<Arc<Plan>> {
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let known = plan.as_ref();
        let known = known.filter(|plan| plan.num_micro_batches() == num_micro_batches);
        if let Some(known) = known {
            return Ok(known.clone());
        }
        // A rank without micro-batches takes part in the sums of the step.
        let made = match num_micro_batches {
            0 => Plan::of_lists(layout, 0, vec![Vec::new(); layout.num_ranks()])?,
            _ => Plan::new(self.schedule.as_ref(), layout, num_micro_batches)?,
        };
        Ok(plan.insert(Arc::new(made)).clone())
    }

    /// The list of this rank for the passes of a step.
    fn program(
        &self,
        part: &ModelPart,
        plan: &Arc<Plan>,
        gradients: &Gradients,
    ) -> Result<Arc<Program>> {
        let known = part.program.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        if let Some((of, program)) = &*known
            && Arc::ptr_eq(of, plan)
        {
            return Ok(program.clone());
        }
        let setup = Setup::of_rank(part.params(), gradients.column().is_away());
        let program = Arc::new(Lowering::new(setup).passes(&Passes {
            plan,
            list: &self.list(plan),
            trains: true,
        })?);
        *known = Some((plan.clone(), program.clone()));
        Ok(program)
    }

    /// The instructions of this rank, with its messages.
    pub(super) fn list(&self, plan: &Plan) -> Vec<Instruction> {
        plan.with_messages(self.pp.rank(), self.prefetch)
    }
}

/// An error that names the first micro-batch without values: nothing could be learned from it, nor a gradient come of
/// it.
fn check_have_rows(micro_batches: &[Pass]) -> Result<()> {
    for (index, pass) in micro_batches.iter().enumerate() {
        if pass.inputs().elem_count() == 0 {
            bail!(
                "the inputs of micro-batch {index} have shape {:?}, which has no values\nhint: leave the micro-batch out; where replicas must have \
                 as many, a token whose target is IGNORE_INDEX stands for one without samples",
                pass.inputs().shape()
            );
        }
    }
    Ok(())
}

/// The part of these passes that each context-parallel rank computes.
fn work_of_ranks(passes: &[Pass]) -> Result<Vec<ContextRank>> {
    let mut all: Vec<ContextRank> = Vec::new();
    for cut in passes.iter().filter_map(Pass::of_cut) {
        let of_pass = cut.work()?;
        all.resize(of_pass.len(), ContextRank::default());
        for (sum, of_rank) in all.iter_mut().zip(of_pass) {
            sum.num_rows += of_rank.num_rows;
            sum.num_pairs += of_rank.num_pairs;
        }
    }
    Ok(all)
}
