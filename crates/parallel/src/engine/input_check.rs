//! Finds ranks of a replica that are given different micro-batches or run them in another way, and replicas that are
//! given unequal numbers where each micro-batch moves something between them.
//!
//! Tensor-parallel ranks with different tokens train on sums that mean nothing, without a word; stages, and replicas under ZeRO-2
//! and 3, with different numbers of micro-batches or other schedules wait for each other until the deadline. So what
//! ranks have, and in which order they are to make their collectives, is compared before each step's passes, by one sum of three numbers, for which the host waits for a GPU:
//! ranks that wait for each other would not come to the sum at the end of the step.

use std::hash::Hasher;

use candle_comm::{Mesh, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use twox_hash::XxHash64;

use crate::agreement::{Comparison, gather};
use crate::pass::Pass;

/// How a rank runs its micro-batches, condensed: the same on every rank of a replica.
#[derive(Clone, Copy, Default)]
pub(super) struct HowRun {
    /// The lists of all ranks of the pipeline.
    pub schedule: u64,
    /// The recomputation of each block of the model.
    pub recompute: u64,
    /// The collectives that this rank makes in the passes, in their order.
    pub collectives: u64,
}

/// Compares, before each step's passes, what the ranks of each replica are given.
pub(super) struct InputCheck {
    mesh: Mesh,
    /// Whether ranks share a replica.
    has_mates: bool,
}

impl InputCheck {
    /// `None` for one rank alone.
    pub fn new(mesh: &Mesh) -> Option<Self> {
        let is_needed = mesh.world.world_size() > 1;
        is_needed.then(|| Self {
            has_mates: mesh.degrees.pp * mesh.degrees.cp * mesh.degrees.tp > 1,
            mesh: mesh.clone(),
        })
    }

    /// An error on every rank that names two ranks of a replica whose micro-batches differ, and how, or that run them
    /// in another way, or two replicas with unequal numbers of them or other schedules if these must be equal. Every
    /// rank must call it.
    pub fn run(&self, micro_batches: &[Pass], how: HowRun, counts_are_equal: bool) -> Result<()> {
        if !self.has_mates && !counts_are_equal {
            return Ok(());
        }
        let given = self.given(micro_batches, how)?;
        let mut hasher = XxHash64::default();
        given.iter().for_each(|number| hasher.write_u64(*number));
        let world = &self.mesh.world;
        let place = [self.mesh.dp.rank()];
        let over_replica = Comparison::over_replica(&self.mesh, &place);
        let over_world = Comparison::over(world, &[]);
        let count = if counts_are_equal {
            micro_batches.len() as u64 ^ how.schedule
        } else {
            0
        };
        // Filled by kernels: copies of the host's numbers would wait for the GPU, as the read below must.
        let zero = Tensor::zeros(1, DType::F64, world.device())?;
        let own = [
            zero.affine(0.0, over_replica.summand(hasher.finish()))?,
            zero.affine(0.0, over_world.summand(count))?,
            zero.affine(0.0, self.collectives(how, counts_are_equal))?,
        ];
        let own = Tensor::cat(&own, 0)?;
        let sums = world.all_reduce(&own, ReduceOp::Sum)?.to_vec1::<f64>()?;
        if sums.iter().all(|sum| *sum == 0.0) {
            return Ok(());
        }
        self.blame(&given, counts_are_equal)?;
        bail!(
            "ranks of a group are to make their collectives in other orders: they would wait for each other, or add up what does not belong \
             together\nhint: every rank builds the model with the same settings, offloaded gradients among them"
        )
    }

    /// This rank's summand of the comparison of collectives: over tensor-parallel ranks, and over replicas that make as many.
    fn collectives(&self, how: HowRun, counts_are_equal: bool) -> f64 {
        let mesh = &self.mesh;
        let place = [mesh.pp.rank(), mesh.replicas.rank()];
        let over_tp = Comparison::over(&mesh.tp, &place).summand(how.collectives);
        let place = [mesh.pp.rank(), mesh.tp.rank()];
        let over_replicas = Comparison::over(&mesh.replicas, &place).summand(how.collectives);
        over_tp + if counts_are_equal { over_replicas } else { 0.0 }
    }

    /// The replica, the number of micro-batches, how they are run, and of each (b, values of each, inputs, targets,
    /// documents), the last three as hashes.
    fn given(&self, micro_batches: &[Pass], how: HowRun) -> Result<Vec<u64>> {
        let mut given = vec![
            self.mesh.dp.rank() as u64,
            micro_batches.len() as u64,
            how.schedule,
            how.recompute,
        ];
        for batch in micro_batches {
            let (b, rest) = batch.inputs().dims().split_first().unwrap_or((&1, &[]));
            let (b, t) = (*b, rest.iter().product::<usize>());
            let targets = match batch.has_targets() {
                true => Some(hash_of(batch.targets()?)?),
                false => None,
            };
            let documents = batch.documents().map(|documents| {
                let mut hasher = XxHash64::default();
                let starts = documents.starts().iter();
                starts.for_each(|start| hasher.write_u32(*start));
                hasher.finish()
            });
            let hashes = [
                hash_of(batch.inputs())?,
                targets.unwrap_or_default(),
                documents.unwrap_or_default(),
            ];
            given.extend([b as u64, t as u64].into_iter().chain(hashes));
        }
        Ok(given)
    }

    /// The error for what ranks were given, this one `given`; every rank must call it.
    fn blame(&self, given: &[u64], counts_are_equal: bool) -> Result<()> {
        let all: Vec<Vec<u64>> = gather(&self.mesh.world, &given)?;
        for (rank, given) in all.iter().enumerate() {
            let mates = all.iter().position(|other| other.first() == given.first());
            if let Some(mate) = mates.filter(|&mate| all[mate] != *given) {
                if let Some(other) = differs_in_how(&all[mate], given) {
                    bail!("ranks {mate} and {rank} belong to one replica and {other}");
                }
                bail!(
                    "ranks {mate} and {rank} belong to one replica and were given different micro-batches: {}\nhint: the \
                     ranks of a pipeline, of a context-parallel and of a tensor-parallel group share their data; only data-parallel ranks \
                     (mesh.dp.rank()) have data of their own",
                    difference(mate, &all[mate], rank, given)
                );
            }
            if counts_are_equal && given.get(1) != all[0].get(1) {
                bail!(
                    "replicas have unequal numbers of micro-batches: {}\nhint: with ZeRO-2, ZeRO-3 and offloaded weights \
                     that replicas divide each micro-batch's gradients or weights move between replicas; give all of them as many, or use ZeRO-1 \
                     (ZeRO-0 if weights are offloaded)",
                    difference(0, &all[0], rank, given)
                );
            }
            if counts_are_equal && given.get(SCHEDULE) != all[0].get(SCHEDULE) {
                bail!("ranks 0 and {rank} {OTHER_SCHEDULE}");
            }
        }
        Ok(())
    }
}

/// Places in what is given: the schedule, what is recomputed, the first micro-batch.
const SCHEDULE: usize = 2;
const RECOMPUTE: usize = 3;
const BATCHES: usize = 4;

const OTHER_SCHEDULE: &str = "run other schedules\nhint: every rank makes its Pipeline with the same Schedule, or with a function that gives the \
    same lists of all ranks wherever it is asked";

/// How two ranks with equally many micro-batches run them in other ways, in words.
fn differs_in_how(a: &[u64], b: &[u64]) -> Option<&'static str> {
    if a.get(1) != b.get(1) {
        return None;
    }
    if a.get(SCHEDULE) != b.get(SCHEDULE) {
        return Some(OTHER_SCHEDULE);
    }
    let is_other = a.get(RECOMPUTE) != b.get(RECOMPUTE);
    is_other.then_some(
        "recompute other blocks\nhint: ModelPart::with_recompute is told the same on every rank",
    )
}

/// The first difference between the micro-batches of two ranks, in words.
fn difference(mate: usize, a: &[u64], rank: usize, b: &[u64]) -> String {
    if a.get(1) != b.get(1) {
        let count = |given: &[u64]| given.get(1).copied().unwrap_or_default();
        return format!("rank {mate} has {}, rank {rank} has {}", count(a), count(b));
    }
    let place = (BATCHES..a.len()).find(|&place| a.get(place) != b.get(place));
    let place = place.unwrap_or(BATCHES) - BATCHES;
    let index = place / 5;
    match place % 5 {
        0 | 1 => {
            let first = BATCHES + 5 * index;
            let shape = |given: &[u64]| given.get(first..first + 2).map(<[u64]>::to_vec);
            let (a, b) = (shape(a).unwrap_or_default(), shape(b).unwrap_or_default());
            format!("micro-batch {index} has shape {a:?} on rank {mate} and {b:?} on rank {rank}")
        }
        2 => format!("the inputs of micro-batch {index} differ"),
        3 => format!("the targets of micro-batch {index} differ"),
        _ => format!("the documents of micro-batch {index} differ"),
    }
}

/// A hash of values on the host, ids of tokens or numbers.
fn hash_of(values: &Tensor) -> Result<u64> {
    let values = values.flatten_all()?;
    let mut hasher = XxHash64::default();
    match values.dtype() {
        DType::U32 => {
            let ids = values.to_vec1::<u32>()?;
            ids.iter().for_each(|id| hasher.write_u32(*id));
        }
        dtype if dtype.is_int() => {
            let ids = values.to_dtype(DType::I64)?.to_vec1::<i64>()?;
            ids.iter().for_each(|id| hasher.write_i64(*id));
        }
        _ => {
            let values = values.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            values
                .iter()
                .for_each(|value| hasher.write_u64(value.to_bits()));
        }
    }
    Ok(hasher.finish())
}
