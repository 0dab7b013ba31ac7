//! How to run ranks as threads.

use std::time::Duration;

use candle_core::{Device, Result};

use crate::Degrees;
use crate::cores::num_cores;
use crate::error::argument;
#[cfg(feature = "cuda")]
use crate::memory::device::has_a_stream;
use crate::memory::device::name;

/// Longer than ranks take that notice, on a machine with much else to do.
pub(crate) const ABORT_AFTER: Duration = Duration::from_secs(10);

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
    /// How long the others may take to end after a rank failed. They notice in their next operation; one that computes for ever does
    /// not, and cannot be stopped: then the process ends, with exit code 1 and a message that has the failure and the ranks that did
    /// not end. Default: 10 seconds.
    pub abort_after: Duration,
    /// With a seed: every rank sleeps 0 to 2 ms before each operation, so that tests meet many interleavings.
    /// Default: none.
    pub delays: Option<u64>,
    /// How long a message between two ranks is on its way, as over a network; who sends does not wait for it. Default: no time.
    pub latency: Duration,
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
            return Err(argument(format!(
                "{degrees} is not a number of ranks: every degree must be at least 1"
            )));
        };
        Ok(Self {
            threads_per_rank: Some((num_cores() * degrees.pp / world_size).max(1)),
            ..Self::new(world_size)
        })
    }

    /// One device for each rank.
    ///
    /// # Errors
    /// Devices of different kinds, a kind without a backend, and a GPU whose work has no order.
    pub(super) fn device_of_each(&self) -> Result<Vec<Device>> {
        let devices = match &self.devices[..] {
            [] => &[Device::Cpu],
            devices => devices,
        };
        for device in devices {
            check(device)?;
            if device.is_cpu() != devices[0].is_cpu() {
                return Err(argument(format!(
                    "the ranks of a run are all on the CPU or all on GPUs, got {} and {}",
                    name(&devices[0]),
                    name(device)
                )));
            }
        }
        let in_turn = devices.iter().cycle();
        Ok(in_turn.take(self.world_size).cloned().collect())
    }
}

fn check(device: &Device) -> Result<()> {
    let message = match device {
        Device::Cpu => return Ok(()),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) if has_a_stream(cuda) => return Ok(()),
        Device::Cuda(_) => format!(
            "ranks cannot share {}: it was opened with a stream for each thread, without order between them\n\
             hint: open it by `Device::new_cuda_with_stream`",
            name(device)
        ),
        Device::Metal(_) => format!("the local backend has no {}", name(device)),
    };
    Err(argument(message))
}

impl Default for LocalConfig {
    /// One rank.
    fn default() -> Self {
        Self {
            world_size: 1,
            devices: Vec::new(),
            deadline: Duration::from_secs(600),
            abort_after: ABORT_AFTER,
            delays: None,
            latency: Duration::ZERO,
            threads_per_rank: None,
        }
    }
}
