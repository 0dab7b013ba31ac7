//! How to run ranks as threads.

use std::time::Duration;

use candle_core::{Device, Result};

use crate::cores::num_cores;
use crate::{Degrees, Error};

/// How to run ranks as threads of this process; see [`launch::threads_with`](crate::launch::threads_with).
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// Number of ranks.
    pub world_size: usize,
    /// The devices of the ranks, which take them in turn. Ranks on one GPU share a clone of one `Device` and hence its
    /// stream. All must be the CPU, or all GPUs. Default: none, which means the CPU.
    pub devices: Vec<Device>,
    /// How long one wait may last before it becomes an error. Default: 10 minutes, more than any step of a run on
    /// one machine should take.
    pub deadline: Duration,
    /// With a seed: every rank sleeps 0 to 2 ms before each operation, so that tests meet many interleavings.
    /// Default: none.
    pub delays: Option<u64>,
    /// Threads on which a rank computes, with those of its own rayon pool counted in. Default: the cores (or
    /// RAYON_NUM_THREADS) divided evenly over the ranks, at least one each.
    pub threads_per_rank: Option<usize>,
}

impl LocalConfig {
    /// The defaults for `world_size` ranks.
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            ..Self::default()
        }
    }

    /// One rank for each place of a mesh with these degrees.
    ///
    /// The cores are divided over the ranks of a stage only: a stage that waits for another leaves its cores to it.
    ///
    /// # Errors
    /// A degree is 0, or their product overflows.
    pub fn for_mesh(degrees: &Degrees) -> Result<Self> {
        let Some(world_size) = degrees.world_size().filter(|&world_size| world_size > 0) else {
            return Err(Error::Argument(format!(
                "{degrees} is not a number of ranks: every degree must be at least 1"
            ))
            .into());
        };
        Ok(Self {
            threads_per_rank: Some((num_cores() * degrees.pp / world_size).max(1)),
            ..Self::new(world_size)
        })
    }
}

impl Default for LocalConfig {
    /// One rank.
    fn default() -> Self {
        Self {
            world_size: 1,
            devices: Vec::new(),
            deadline: Duration::from_secs(600),
            delays: None,
            threads_per_rank: None,
        }
    }
}
