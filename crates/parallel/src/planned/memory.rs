//! The bytes that a rank of a run will hold: its step is gone through twice, action after action, as the rank goes through it. What
//! [`MemoryMeter`](crate::MemoryMeter) counts then is counted here, so its peaks, and when they are, are those of the run.

use candle_core::{Error, Result};

use super::bytes::RankBytes;
use super::{PlannedStep, PlannedWork};
use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};
use crate::params::RankSpec;
use crate::program::Lowering;
use crate::schedule::Instruction;

/// The bytes that are held in a part of a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Moment {
    /// The instruction; `None` for the sums and the update after the passes, with what a rank holds before its first step.
    pub instruction: Option<Instruction>,
    /// Bytes of each category: at its end, and the most.
    pub report: MemoryReport,
    /// The most bytes of all categories that are memory of the device at a time.
    pub peak: u64,
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
    /// The bytes that a rank with `spec` will hold. The store that the model was described with had the same
    /// [`DataParallel`](crate::DataParallel).
    ///
    /// # Errors
    /// Settings that do not fit the ranks, stages other than those of the model, trainable parameters of a type that cannot be trained, blocks that
    /// do not say what they keep.
    pub fn new(spec: &RankSpec, work: &PlannedWork<'_>) -> Result<Self> {
        let step = PlannedStep::new(spec, work)?;
        let mut rank = RankBytes::new(&step)?;
        let mut lowering = Lowering::new(step.setup());
        let mut moments = || {
            let mut moments = Vec::new();
            for list in step.lower(&mut lowering)? {
                moments.extend(rank.run(&list, &mut |_, _| ()));
            }
            moments.push(rank.end_step());
            Ok::<_, Error>(moments)
        };
        let (first, timeline) = (moments()?, moments()?);
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

    /// The actions of the first `num_steps` steps of a rank with `spec`, and the bytes that it will hold after each.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn by_action(
        spec: &RankSpec,
        work: &PlannedWork<'_>,
        num_steps: usize,
    ) -> Result<Vec<(String, MemoryReport)>> {
        let step = PlannedStep::new(spec, work)?;
        let mut rank = RankBytes::new(&step)?;
        let mut lowering = Lowering::new(step.setup());
        let mut all = Vec::new();
        for _ in 0..num_steps {
            for list in step.lower(&mut lowering)? {
                rank.run(&list, &mut |action, report| {
                    all.push((format!("{action:?}"), report));
                });
            }
        }
        Ok(all)
    }

    /// The most bytes at a time and those between steps, by category.
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
