//! What a rank of a run will hold, by arithmetic: no device, no tensor, no other rank. See `docs/design.md`, "What a rank holds".
//!
//! The step is gone through twice, instruction after instruction, as a rank goes through it: what [`MemoryMeter`](crate::MemoryMeter) counts
//! then is counted here, so its peaks, and when they are, are those of the run.

mod held;
mod planned_store;
mod rank;

use candle_core::{Result, bail};

pub use held::Moment;

use crate::data_parallel::DataParallel;
use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};
use crate::offload::Offload;
use crate::optimizer::Optimizer;
use crate::params::{PackWeights, RankSpec};
use crate::pass::{Recompute, Tape};
use crate::schedule::Plan;
use rank::PlannedRank;

/// What a rank does with what it has of a model. With passes and updates it trains; with passes that only go forward it evaluates; with
/// updates alone it is a server, whose gradients come from workers.
#[derive(Clone, Copy)]
pub struct PlannedWork<'a> {
    /// How replicas work together.
    pub replicas: DataParallel,
    /// What a rank keeps away from its device.
    pub offload: &'a Offload,
    /// Which weights stay packed for products.
    pub pack_weights: PackWeights,
    /// Whether ranks compute on GPUs, whose memory is not the host's.
    pub on_gpu: bool,
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
    /// What the blocks of the model keep: [`ModelSpec::tapes`](crate::ModelSpec::tapes).
    pub tapes: &'a [Option<Tape>],
    /// What is computed again, but of the first and the last block.
    pub recompute: Recompute,
    /// Rows of a micro-batch that the rank has: tokens, of context-parallel ranks those of one.
    pub num_rows: usize,
}

impl PlannedPasses<'_> {
    /// An error that names a block of which nothing is known.
    fn check(&self) -> Result<()> {
        let num_blocks = self.plan.layout().num_blocks();
        if self.tapes.is_empty() {
            bail!(
                "nothing is known of what the blocks keep between their passes\nhint: ModelSpec::describe asks the blocks of a model; one that was built does not know"
            );
        }
        if let Some(block) = (0..num_blocks).find(|&block| self.said(block).is_none()) {
            bail!(
                "block {block} does not say what it keeps between its passes, so its memory cannot be planned\nhint: Layer::tape and Head::tape \
                 say it, and ModelSpec::describe asks the blocks of a model"
            );
        }
        Ok(())
    }

    fn said(&self, block: usize) -> Option<Tape> {
        self.tapes.get(block).copied().flatten()
    }

    fn tape(&self, block: usize) -> Tape {
        self.said(block).unwrap_or_default()
    }

    fn recompute_of(&self, block: usize) -> Recompute {
        let last = self.plan.layout().num_blocks() - 1;
        match (1..last).contains(&block) {
            true => self.recompute,
            false => Recompute::None,
        }
    }

    /// Of a micro-batch, what the tape keeps of a block.
    fn kept_bytes(&self, block: usize) -> usize {
        self.tape(block)
            .kept(self.recompute_of(block))
            .saturating_mul(self.num_rows)
    }

    /// What a block gets from the one before it.
    fn input_bytes(&self, block: usize) -> usize {
        self.tape(block).input.saturating_mul(self.num_rows)
    }

    /// What a block keeps from the input half to the weight half of its backward pass; `without_large` and `weights_stay` as the schedule
    /// and the replicas have it.
    fn waiting_bytes(&self, block: usize, without_large: bool, weights_stay: bool) -> usize {
        let tape = self.tape(block);
        tape.waits(self.recompute_of(block), without_large, weights_stay)
            .saturating_mul(self.num_rows)
    }
}

/// The update of a step.
#[derive(Clone, Copy)]
pub struct PlannedUpdate<'a> {
    /// The rule of all parameters, which it updates whichever values of them a rank has. Parameter groups with rules of their own are not
    /// planned.
    pub rule: &'a dyn Optimizer,
}

/// The bytes that a rank of a run will hold, by what they are for and when.
///
/// ```
/// use candle_core::{DType, Device, Result};
/// use candle_parallel::{
///     AdamW, AdamWConfig, DataParallel, MemoryCategory, MemoryPlan, ModelSpec, Offload, PackWeights, ParamStore, PipelineLayout, Plan,
///     PlannedPasses, PlannedUpdate, PlannedWork, Recompute, Schedule, column_parallel_linear, layer_block,
/// };
/// use candle_comm::ProcessGroup;
///
/// fn main() -> Result<()> {
///     let vb = ParamStore::init(0).builder(DType::F32, &Device::Cpu);
///     // Two blocks of 100 weights each.
///     let layout = PipelineLayout::even(2, 1)?;
///     let model = ModelSpec::describe(layout, Default::default(), &vb, |index, vb| {
///         let linear = column_parallel_linear(10, 10, false, ProcessGroup::single(Device::Cpu), vb.pp(index))?;
///         Ok(layer_block(linear))
///     })?;
///     let plan = Plan::new(&Schedule::OneForwardOneBackward, model.layout(), 4)?;
///     let work = PlannedWork {
///         replicas: DataParallel::default(),
///         pack_weights: PackWeights::Off,
///         offload: &Offload::default(),
///         on_gpu: false,
///         passes: Some(PlannedPasses { plan: &plan, tapes: model.tapes(), recompute: Recompute::None, num_rows: 100 }),
///         update: Some(PlannedUpdate { rule: &AdamW(AdamWConfig::default()) }),
///     };
///     let memory = MemoryPlan::new(&model.of_rank(0), &work)?;
///     assert_eq!(memory.report().of(MemoryCategory::Weights).peak, 2 * 100 * 4);
///     // The inputs of both, in f32.
///     assert_eq!(memory.report().of(MemoryCategory::Activations).peak, 2 * 100 * 10 * 4);
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
    /// Settings that do not fit the ranks, stages other than those of the model, trainable parameters of a type that cannot be trained, blocks that
    /// do not say what they keep.
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

    /// The most bytes of all categories that are memory of the device at a time, which is at most the sum of their peaks.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The second step and those after it, in their order.
    pub fn timeline(&self) -> &[Moment] {
        &self.timeline
    }
}
