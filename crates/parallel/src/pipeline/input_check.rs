//! Finds ranks of a replica that are given different micro-batches, and replicas that are given unequal numbers where each
//! micro-batch moves something between them.
//!
//! Tensor-parallel ranks with different tokens train on sums that mean nothing, without a word; stages, and replicas under ZeRO-2
//! and 3, with different numbers of micro-batches wait for each other until the deadline. So what ranks have is compared before each
//! step's passes, by one sum of two numbers, for which the host waits for a GPU: ranks that wait for each other would not come to the sum
//! at the end of the step.

use std::hash::Hasher;

use candle_comm::{Mesh, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use twox_hash::XxHash64;

use crate::agreement::Comparison;
use crate::pass::Pass;

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

    /// An error on every rank that names two ranks of a replica whose micro-batches differ, and how, or two replicas with unequal
    /// numbers of them if these must be equal. Every rank must call it.
    pub fn run(&self, micro_batches: &[Pass], counts_are_equal: bool) -> Result<()> {
        if !self.has_mates && !counts_are_equal {
            return Ok(());
        }
        let given = self.given(micro_batches)?;
        let mut hasher = XxHash64::default();
        given.iter().for_each(|number| hasher.write_u64(*number));
        let (world, degrees) = (&self.mesh.world, self.mesh.degrees);
        let place = [self.mesh.dp.rank()];
        let over_replica = Comparison {
            num_ranks: degrees.pp * degrees.cp * degrees.tp,
            is_first: [&self.mesh.pp, &self.mesh.cp, &self.mesh.tp]
                .into_iter()
                .all(|group| group.rank() == 0),
            place: &place,
        };
        let over_world = Comparison::over(world, &[]);
        let count = match counts_are_equal {
            true => micro_batches.len() as u64,
            false => 0,
        };
        // Filled by kernels: copies of the host's numbers would wait for the GPU, as the read below must.
        let zero = Tensor::zeros(1, DType::F64, world.device())?;
        let own = [
            zero.affine(0.0, over_replica.summand(hasher.finish()))?,
            zero.affine(0.0, over_world.summand(count))?,
        ];
        let own = Tensor::cat(&own, 0)?;
        let sums = world.all_reduce(&own, ReduceOp::Sum)?.to_vec1::<f64>()?;
        match sums.iter().all(|sum| *sum == 0.0) {
            true => Ok(()),
            false => self.blame(&given, counts_are_equal),
        }
    }

    /// The replica, the number of micro-batches, and of each (b, values of each, inputs, targets, documents), the last three as hashes.
    fn given(&self, micro_batches: &[Pass]) -> Result<Vec<u64>> {
        let mut given = vec![self.mesh.dp.rank() as u64, micro_batches.len() as u64];
        for batch in micro_batches {
            let dims = batch.inputs().dims();
            let (b, rest) = dims.split_first().unwrap_or((&1, &[]));
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
        let bytes: Vec<u8> = given
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect();
        let all = self.mesh.world.all_gather_bytes(&bytes)?;
        let all: Vec<Vec<u64>> = all.iter().map(|bytes| numbers(bytes)).collect();
        for (rank, given) in all.iter().enumerate() {
            let mates = all.iter().position(|other| other.first() == given.first());
            if let Some(mate) = mates.filter(|&mate| all[mate] != *given) {
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
        }
        Ok(())
    }
}

/// What differs, in words: (replica, number of micro-batches), then (b, values of each, inputs, targets, documents) of each.
fn difference(mate: usize, a: &[u64], rank: usize, b: &[u64]) -> String {
    if a.get(1) != b.get(1) {
        let count = |given: &[u64]| given.get(1).copied().unwrap_or_default();
        return format!("rank {mate} has {}, rank {rank} has {}", count(a), count(b));
    }
    let place = (2..a.len()).find(|&place| a.get(place) != b.get(place));
    let place = place.unwrap_or(2) - 2;
    let index = place / 5;
    match place % 5 {
        0 | 1 => {
            let shape =
                |given: &[u64]| given.get(2 + 5 * index..4 + 5 * index).map(<[u64]>::to_vec);
            let (a, b) = (shape(a).unwrap_or_default(), shape(b).unwrap_or_default());
            format!("micro-batch {index} has shape {a:?} on rank {mate} and {b:?} on rank {rank}")
        }
        2 => format!("the inputs of micro-batch {index} differ"),
        3 => format!("the targets of micro-batch {index} differ"),
        _ => format!("the documents of micro-batch {index} differ"),
    }
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    let numbers = bytes.chunks_exact(8);
    let numbers = numbers.filter_map(|bytes| bytes.try_into().ok());
    numbers.map(u64::from_le_bytes).collect()
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
