//! Memory and time of a rank's step by arithmetic: no device, no tensor, no other rank. See `docs/design.md`, "What a rank
//! holds".

mod bytes;
mod memory;
mod text;
mod tiles;
mod time;
mod waiting;

use candle_core::{Result, bail};

use crate::data_parallel::DataParallel;
use crate::offload::{Offload, OffloadPlace, num_bytes_of};
use crate::optimizer::{BucketShape, Optimizer, StateSlices};
use crate::params::{PackWeights, RankSpec, ReplicaGroups};
use crate::pass::{Recompute, Tape};
use crate::program::{Lowering, Passes, Program, Setup};
use crate::schedule::{Instruction, Plan};
pub use memory::{MemoryPlan, Moment};

/// Bytes of a gradient.
const GRADIENT_BYTES: usize = 4;

/// What a rank does with what it has of a model. With passes and updates it trains; with passes that only go forward it evaluates; with
/// updates alone it is a server, whose gradients come from workers.
#[derive(Clone, Copy)]
pub struct PlannedWork<'a> {
    /// How replicas work together.
    pub replicas: DataParallel,
    /// Weights, sums, state and activations that are kept away from the device.
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
    /// The passes of all ranks of the pipeline.
    pub plan: &'a Plan,
    /// Bytes that the blocks of the model keep: [`ModelSpec::tapes`](crate::ModelSpec::tapes).
    pub tapes: &'a [Option<Tape>],
    /// The recomputation of all blocks but the first and the last one.
    pub recompute: Recompute,
    /// Rows of a micro-batch that the rank has: tokens, of context-parallel ranks those of one.
    pub num_rows: usize,
}

impl PlannedPasses<'_> {
    /// An error that names a block of which nothing is known.
    pub(super) fn check(&self) -> Result<()> {
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

    pub(super) fn said(&self, block: usize) -> Option<Tape> {
        self.tapes.get(block).copied().flatten()
    }

    pub(super) fn tape(&self, block: usize) -> Tape {
        self.said(block).unwrap_or_default()
    }

    pub(super) fn recompute_of(&self, block: usize) -> Recompute {
        let last = self.plan.layout().num_blocks() - 1;
        match (1..last).contains(&block) {
            true => self.recompute,
            false => Recompute::None,
        }
    }

    /// Whether the tape keeps the input of a block, and nothing else.
    pub(super) fn keeps_input(&self, block: usize) -> bool {
        let is_head = block + 1 == self.plan.layout().num_blocks();
        is_head || self.recompute_of(block) == Recompute::Full
    }

    /// Bytes that the tape keeps of a block for a micro-batch.
    pub(super) fn kept_bytes(&self, block: usize) -> usize {
        self.tape(block)
            .kept(self.recompute_of(block))
            .saturating_mul(self.num_rows)
    }

    /// Bytes that a block gets from the one before it.
    pub(super) fn input_bytes(&self, block: usize) -> usize {
        self.tape(block).input.saturating_mul(self.num_rows)
    }

    /// Bytes that a block keeps from the input half to the weight half of its backward pass; `without_large` and `weights_stay` as the schedule
    /// and the replicas have it.
    pub(super) fn waiting_bytes(
        &self,
        block: usize,
        without_large: bool,
        weights_stay: bool,
    ) -> usize {
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

/// The lists of a rank's step.
pub(crate) struct PlannedStep<'a> {
    spec: &'a RankSpec,
    work: PlannedWork<'a>,
    groups: ReplicaGroups,
    /// The rank's instructions.
    list: Vec<Instruction>,
    /// Whether passes go backward, too.
    trains: bool,
    /// Shapes of the optimizer's state, by bucket, and the parts in which it is updated.
    state: Option<(Vec<BucketShape>, StateSlices)>,
    /// Bytes of each slice of weights, of each sum of gradients, of each part of the state, as [`Item::place`] has them.
    item_bytes: [Vec<usize>; 3],
}

impl<'a> PlannedStep<'a> {
    /// The step of a rank with `spec`. The store that the model was described with had the same [`DataParallel`].
    pub fn new(spec: &'a RankSpec, work: &PlannedWork<'a>) -> Result<Self> {
        let place = work.offload.place_of_params(0, work.on_gpu);
        let offloads_weights = place != OffloadPlace::Device;
        let groups = ReplicaGroups::unconnected(
            work.replicas,
            offloads_weights,
            spec.replica,
            spec.num_replicas,
        )?;
        let mut list = Vec::new();
        if let Some(passes) = &work.passes {
            check_stages(spec, passes.plan)?;
            list = passes.plan.joined(spec.pp_rank);
        }
        let goes_backward = |instruction: &Instruction| {
            matches!(
                instruction,
                Instruction::Backward(_) | Instruction::InputGrad(_)
            )
        };
        let shapes = work.update.as_ref();
        let shapes = shapes.map(|update| state_shapes(spec, &groups, update));
        let state_is_away = work
            .offload
            .place_of_optimizer(0, work.on_gpu)
            .category()
            .is_some();
        let with_slices = |shapes: Vec<BucketShape>| {
            let most = if state_is_away {
                work.offload.update_values
            } else {
                usize::MAX
            };
            let slices = StateSlices::new(&shapes, most);
            (shapes, slices)
        };
        let trains = list.iter().any(goes_backward);
        let state = shapes.transpose()?.map(with_slices);
        let slices = spec.layout.all();
        let slices = slices.map(|bucket| bucket.num_bytes() / groups.shard.world_size());
        let sums = spec.layout.of_gradients().filter(|_| trains);
        let sums = sums.map(|bucket| GRADIENT_BYTES * groups.own_part_of_sum(bucket.len).1);
        let states = state.iter().flat_map(|(shapes, parts)| parts.items(shapes));
        Ok(Self {
            item_bytes: [
                slices.collect(),
                sums.collect(),
                states.map(num_bytes_of).collect(),
            ],
            spec,
            work: *work,
            trains,
            state,
            groups,
            list,
        })
    }

    fn setup(&self) -> Setup<'_> {
        let (offload, on_gpu) = (self.work.offload, self.work.on_gpu);
        let sums = offload.place_of_gradients(0, on_gpu);
        let state = offload.place_of_optimizer(0, on_gpu);
        let slices = self.state.as_ref();
        Setup {
            spec: self.spec,
            groups: &self.groups,
            sums_are_away: self.trains && sums.category().is_some(),
            state_parts: slices.map_or(&[], |(_, slices)| slices.num_parts()),
            state_is_away: state.category().is_some(),
        }
    }

    /// Lowers a step: its passes, and what follows them.
    fn lower(&self, lowering: &mut Lowering<'_>) -> Result<Vec<Program>> {
        let mut lists = Vec::new();
        if let Some(passes) = self.work.passes {
            lists.push(lowering.passes(&Passes {
                plan: passes.plan,
                list: &self.list,
                trains: self.trains,
            })?);
        }
        if self.trains {
            lists.push(lowering.reduce()?);
        }
        if self.state.is_some() {
            lists.push(lowering.update()?);
        }
        Ok(lists)
    }
}

/// An error unless the model's stages on this rank are those of the plan.
fn check_stages(spec: &RankSpec, plan: &Plan) -> Result<()> {
    let layout = plan.layout();
    let planned = layout.stages_of(spec.pp_rank);
    let planned: Vec<_> = planned.map(|stage| layout.blocks(stage)).collect();
    if planned != spec.stages || spec.pp_rank >= plan.ranks().len() {
        bail!(
            "the plan has the blocks {planned:?} on rank {} of the pipeline; expected those of the model there, {:?}",
            spec.pp_rank,
            spec.stages
        );
    }
    Ok(())
}

/// Shapes of the optimizer's state of each bucket.
fn state_shapes(
    spec: &RankSpec,
    groups: &ReplicaGroups,
    update: &PlannedUpdate<'_>,
) -> Result<Vec<BucketShape>> {
    let buckets = spec.layout.buckets.iter();
    let shapes = buckets.map(|bucket| {
        let len = groups.own_range(bucket.len).len();
        let first = bucket.slots.first();
        let name = first.map_or("", |slot| spec.params[slot.param].name.as_str());
        BucketShape::of_rule(update.rule, len, bucket.dtype, name)
    });
    shapes.collect()
}
