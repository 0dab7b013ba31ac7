//! How this process takes part in a run over NCCL.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Result};

use crate::HalfSums;

/// Brings rank 0's bytes to all ranks: called once by every rank, with nothing on the others.
pub type Exchange = Arc<dyn Fn(&[u8]) -> Result<Vec<u8>> + Send + Sync>;

/// How this process, or this thread of it, takes part in a run over NCCL; see [`launch::nccl`](crate::launch::nccl).
#[derive(Clone)]
pub struct NcclConfig {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The rank's GPU, opened by `Device::new_cuda_with_stream`. Each rank has one of its own.
    pub device: Device,
    /// How the ranks find each other: it carries NCCL's unique id.
    pub exchange: Exchange,
    /// How long one operation may be under way before the run ends with an error. Default: 10 minutes.
    pub deadline: Duration,
    /// How bf16 and f16 are added, the same on all ranks. Default: in f32.
    pub half_sums: HalfSums,
    /// Threads on which this rank computes. Default: RAYON_NUM_THREADS or the cores, divided by the number of GPUs; at least
    /// one.
    pub threads_per_rank: Option<usize>,
}

impl NcclConfig {
    /// The defaults for a rank.
    pub fn new(rank: usize, world_size: usize, device: Device, exchange: Exchange) -> Self {
        Self {
            rank,
            world_size,
            device,
            exchange,
            deadline: Duration::from_secs(600),
            half_sums: HalfSums::default(),
            threads_per_rank: None,
        }
    }
}

impl std::fmt::Debug for NcclConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclConfig")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("device", &self.device.location())
            .finish_non_exhaustive()
    }
}
