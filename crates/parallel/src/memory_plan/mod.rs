//! What a rank of a run will hold, by arithmetic: no device, no tensor, no other rank. See `docs/design.md`, "What a rank holds".
//!
//! The step is gone through twice, instruction after instruction, as a rank goes through it: what [`MemoryMeter`](crate::MemoryMeter) counts
//! then is counted here, so its peaks, and when they are, are those of the run.

mod held;
mod optimizer_state;
mod rank;

use candle_core::Result;

pub use held::Moment;

use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};
use crate::optimizer::{Offload, Optimizer};
use crate::params::{DataParallel, RankSpec};
use crate::schedule::Plan;
use rank::PlannedRank;

/// What a rank does with what it has of a model. With passes and updates it trains; with passes that only go forward it evaluates; with
/// updates alone it is a server, whose gradients come from workers.
#[derive(Clone, Copy)]
pub struct PlannedWork<'a> {
    /// How replicas work together.
    pub replicas: DataParallel,
    /// The passes of a step.
    pub passes: Option<PlannedPasses<'a>>,
    /// The update after them.
    pub update: Option<PlannedUpdate<'a>>,
}

/// The passes of a step.
#[derive(Clone, Copy)]
pub struct PlannedPasses<'a> {
    /// What the ranks of the pipeline compute.
    pub plan: &'a Plan,
    /// Bytes that the tape keeps of a block, given by its index, for one micro-batch.
    pub tape_bytes: &'a dyn Fn(usize) -> usize,
    /// Bytes that the jobs of a block keep for one micro-batch between the halves of its backward pass, where a schedule has such.
    pub waiting_bytes: &'a dyn Fn(usize, Waiting) -> usize,
    /// Bytes that a stage gives to the next one of a micro-batch.
    pub border_bytes: usize,
}

/// What the gradients of weights wait for, and with what, between the halves of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Whether those do not wait that would keep more than the forward pass has kept: [`GradientSink::put_large`](crate::GradientSink::put_large).
    pub without_large: bool,
    /// Whether the weights are still there in the weight half: without it, what is computed with them waits.
    pub weights_stay: bool,
}

/// The update of a step.
#[derive(Clone, Copy)]
pub struct PlannedUpdate<'a> {
    /// The rule of all parameters, which it updates whichever values of them a rank has. Parameter groups with rules of their own are not
    /// planned.
    pub rule: &'a dyn Optimizer,
    /// Where its state is.
    pub offload: &'a Offload,
    /// Whether ranks compute on GPUs, whose memory is not the host's.
    pub on_gpu: bool,
}

/// The bytes that a rank of a run will hold, by what they are for and when.
///
/// ```
/// use candle_core::{DType, Device, Result};
/// use candle_parallel::{
///     AdamW, AdamWConfig, DataParallel, MemoryCategory, MemoryPlan, ModelSpec, Offload, ParamStore, PipelineLayout, Plan,
///     PlannedPasses, PlannedUpdate, PlannedWork, Schedule,
/// };
///
/// fn main() -> Result<()> {
///     let vb = ParamStore::init(0).builder(DType::F32, &Device::Cpu);
///     // Two blocks of 100 weights each.
///     let layout = PipelineLayout::even(2, 1)?;
///     let model = ModelSpec::describe(layout, Default::default(), &vb, |index, vb| {
///         vb.pp(index).get((10, 10), "weight", candle_nn::Init::Const(0.0))
///     })?;
///     let plan = Plan::new(&Schedule::OneForwardOneBackward, model.layout(), 4)?;
///     let work = PlannedWork {
///         replicas: DataParallel::default(),
///         passes: Some(PlannedPasses { plan: &plan, tape_bytes: &|_block| 1000, waiting_bytes: &|_block, _| 0, border_bytes: 0 }),
///         update: Some(PlannedUpdate { rule: &AdamW(AdamWConfig::default()), offload: &Offload::None, on_gpu: false }),
///     };
///     let memory = MemoryPlan::new(&model.of_rank(0), &work)?;
///     assert_eq!(memory.report().of(MemoryCategory::Weights).peak, 2 * 100 * 4);
///     assert_eq!(memory.report().of(MemoryCategory::Activations).peak, 2 * 1000);
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    report: MemoryReport,
    peak: u64,
    timeline: Vec<Moment>,
}

impl MemoryPlan {
    /// What a rank with `spec` will hold. The store that the model was described with had the same [`DataParallel`].
    ///
    /// # Errors
    /// Settings that do not fit the ranks, stages other than those of the model, trainable parameters of a type that cannot be trained.
    pub fn new(spec: &RankSpec, work: &PlannedWork<'_>) -> Result<Self> {
        let mut rank = PlannedRank::new(spec, work)?;
        let (first, timeline) = (rank.step()?, rank.step()?);
        let mut report = MemoryReport::default();
        let mut peak = 0;
        for moment in first.iter().chain(&timeline) {
            report = report.max(&moment.report);
            peak = peak.max(moment.peak);
        }
        let last = timeline.last().map(|last| last.report).unwrap_or_default();
        Ok(Self {
            report: MemoryReport::new(|category: MemoryCategory| MemoryUse {
                now: last.of(category).now,
                peak: report.of(category).peak,
            }),
            peak,
            timeline,
        })
    }

    /// Of each category the most bytes at a time, and those between steps.
    pub fn report(&self) -> MemoryReport {
        self.report
    }

    /// The most bytes of all categories at a time, which is at most the sum of their peaks.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The second step and those after it, in their order.
    pub fn timeline(&self) -> &[Moment] {
        &self.timeline
    }
}
