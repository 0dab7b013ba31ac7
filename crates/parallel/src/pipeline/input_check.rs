//! Finds ranks of a replica that are given different micro-batches, and replicas that are given unequal numbers where each
//! micro-batch moves something between them.
//!
//! Tensor-parallel ranks with different tokens train on sums that mean nothing, without a word; stages, and replicas under ZeRO-2
//! and 3, with different numbers of micro-batches wait for each other until the deadline.

use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Result, Tensor, bail};

use super::micro_batch::MicroBatch;

/// Compares, in the first step, what the ranks of each replica are given.
pub(super) struct InputCheck {
    world: ProcessGroup,
    replica: usize,
    /// Whether ranks share a replica.
    has_mates: bool,
    was_run: AtomicBool,
}

impl InputCheck {
    /// `None` for one rank alone.
    pub fn new(mesh: &Mesh) -> Option<Self> {
        let is_needed = mesh.world.world_size() > 1;
        is_needed.then(|| Self {
            world: mesh.world.clone(),
            replica: mesh.dp.rank(),
            has_mates: mesh.degrees.pp * mesh.degrees.tp > 1,
            was_run: AtomicBool::new(false),
        })
    }

    /// An error on every rank that names two ranks of a replica whose micro-batches differ, and how, or two replicas with unequal
    /// numbers of them if these must be equal; nothing after the first call, which every rank must make.
    pub fn run_once(&self, micro_batches: &[MicroBatch], counts_are_equal: bool) -> Result<()> {
        let is_needed = self.has_mates || counts_are_equal;
        if !is_needed || self.was_run.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let mut said = vec![self.replica as u64, micro_batches.len() as u64];
        for batch in micro_batches {
            let (b, t) = batch.dims()?;
            let targets = batch.targets.as_ref().map(checksum).transpose()?;
            let starts = batch
                .documents
                .as_ref()
                .map(|documents| hash_of(documents.starts()));
            let sums = [
                checksum(&batch.tokens)?,
                targets.unwrap_or_default(),
                starts.unwrap_or_default(),
            ];
            said.extend([b as u64, t as u64].into_iter().chain(sums));
        }
        let bytes: Vec<u8> = said.into_iter().flat_map(u64::to_le_bytes).collect();
        let all = self.world.all_gather_bytes(&bytes)?;
        let all: Vec<Vec<u64>> = all.iter().map(|bytes| numbers(bytes)).collect();
        for (rank, given) in all.iter().enumerate() {
            let mates = all.iter().position(|other| other.first() == given.first());
            if let Some(mate) = mates.filter(|&mate| all[mate] != *given) {
                bail!(
                    "ranks {mate} and {rank} belong to one replica and were given different micro-batches: {}\nhint: the \
                     ranks of a pipeline and of a tensor-parallel group share their data; only data-parallel ranks \
                     (mesh.dp.rank()) have data of their own",
                    difference((mate, &all[mate]), (rank, given))
                );
            }
            if counts_are_equal && given.get(1) != all[0].get(1) {
                bail!(
                    "replicas have unequal numbers of micro-batches: {}\nhint: with ZeRO-2 and ZeRO-3 each micro-batch's \
                     gradients or weights move between replicas; give all of them as many, or use ZeRO-1",
                    difference((0, &all[0]), (rank, given))
                );
            }
        }
        Ok(())
    }
}

/// What differs, in words: (replica, number of micro-batches), then (b, t, tokens, targets, documents) of each.
fn difference((mate, a): (usize, &[u64]), (rank, b): (usize, &[u64])) -> String {
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
        2 => format!("the tokens of micro-batch {index} differ"),
        3 => format!("the targets of micro-batch {index} differ"),
        _ => format!("the documents of micro-batch {index} differ"),
    }
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    let numbers = bytes.chunks_exact(8);
    let numbers = numbers.filter_map(|bytes| bytes.try_into().ok());
    numbers.map(u64::from_le_bytes).collect()
}

fn checksum(ids: &Tensor) -> Result<u64> {
    Ok(hash_of(&ids.flatten_all()?.to_vec1::<u32>()?))
}

fn hash_of(ids: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    ids.iter().for_each(|&id| hasher.write_u32(id));
    hasher.finish()
}
