//! How long a step will take.

use candle_core::{DType, Result, bail};

use super::{PlannedStep, PlannedWork};
use crate::data_parallel::ReduceType;
use crate::params::RankSpec;
use crate::program::{Action, Lowering, TimedRank, simulate};
use crate::schedule::{Simulation, Times};

impl Simulation {
    /// The step of a replica that makes one after another: `ranks` are those of its pipeline, in order. Tensor-parallel ranks and replicas take as
    /// long as these.
    ///
    /// # Errors
    /// Work without passes, ranks or times that do not fit its plan, and as for [`MemoryPlan::new`](crate::MemoryPlan::new).
    pub fn of_step(ranks: &[RankSpec], work: &PlannedWork<'_>, times: &Times) -> Result<Self> {
        let Some(passes) = &work.passes else {
            bail!("a step without passes has no schedule");
        };
        let layout = passes.plan.layout();
        times.check(layout)?;
        if ranks.len() != layout.num_ranks() {
            let num_ranks = layout.num_ranks();
            bail!(
                "{} ranks; expected the {num_ranks} of the pipeline",
                ranks.len()
            );
        }
        let steps = ranks.iter().map(|spec| PlannedStep::new(spec, work));
        let steps: Vec<PlannedStep<'_>> = steps.collect::<Result<_>>()?;
        let timed = steps.iter().map(|step| {
            Ok(TimedRank {
                lists: step.lower(&mut Lowering::new(step.setup()))?,
                seconds: Box::new(|action| step.seconds(action, times)),
                bucket_of_part: step.setup().bucket_of_part(),
                layout: Some(&step.spec.layout),
            })
        });
        let timed: Vec<TimedRank<'_>> = timed.collect::<Result<_>>()?;
        // Weights of an update travel under the next passes: the second step has them.
        Ok(simulate(layout, times, &timed, 2))
    }
}

impl PlannedStep<'_> {
    /// Seconds of an action that is no pass of a block.
    fn seconds(&self, action: Action, times: &Times) -> f64 {
        let (moves, groups) = (&times.moves, &self.groups);
        let layout = &self.spec.layout;
        let weights = |bucket: u32| layout.bucket(bucket as usize).num_bytes();
        // In a ring each rank sends all but one part.
        let ring = |bytes: f64, num_ranks: usize, byte: f64| {
            let others = (num_ranks - 1) as f64 / num_ranks as f64;
            if num_ranks > 1 {
                moves.latency + bytes * others * byte
            } else {
                0.0
            }
        };
        let (shard, replicate) = (groups.shard.world_size(), groups.replicate.world_size());
        let byte = moves.replica_byte;
        match action {
            Action::GatherCopy(bucket) => {
                let copies = groups.secondary.as_ref();
                let num_ranks = copies.map_or(1, |group| group.world_size());
                ring(weights(bucket) as f64, num_ranks, moves.copy_byte)
            }
            Action::Gather(bucket) | Action::Spread(bucket) => {
                ring(weights(bucket) as f64, shard, byte)
            }
            Action::Reduce(bucket) => {
                let bucket = layout.gradient_bucket(bucket as usize);
                let value_bytes = match groups.reduce_type(bucket) {
                    ReduceType::F32 => 4.0,
                    ReduceType::Bf16 => 2.0,
                    ReduceType::Int8 => 1.0,
                    ReduceType::Int4 => 0.5,
                };
                let bytes = bucket.len as f64 * value_bytes;
                match shard {
                    1 => ring(2.0 * bytes, replicate, byte),
                    shard => ring(bytes, shard, byte),
                }
            }
            Action::Settle(bucket) if shard > 1 => {
                let len = layout.gradient_bucket(bucket as usize).len / shard;
                ring(
                    (2 * len * DType::F32.size_in_bytes()) as f64,
                    replicate,
                    byte,
                )
            }
            Action::Fetch(item) | Action::Put(item) => {
                let [kind, index] = item.place();
                self.item_bytes[kind][index] as f64 * moves.offload_byte
            }
            Action::Update(part) => {
                let slices = self.state.as_ref().map(|(_, slices)| slices);
                let num_values = slices.map_or(0, |slices| slices.part(part as usize).1.len());
                num_values as f64 * moves.update_value
            }
            Action::Norm => moves.latency,
            _ => 0.0,
        }
    }
}
