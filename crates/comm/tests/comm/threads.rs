//! Ranks as threads, for the conformance suite.

use candle_comm::{LocalConfig, ProcessGroup, launch};
use candle_core::{Device, Result};

use crate::conformance::Launch;

/// Ranks as threads, on the CPU or on these devices in turn; with a seed, with delays.
#[derive(Default)]
pub struct Threads {
    pub devices: Vec<Device>,
    pub delays: Option<u64>,
}

impl Threads {
    pub fn config(&self, world_size: usize) -> LocalConfig {
        LocalConfig {
            devices: self.devices.clone(),
            delays: self.delays,
            ..LocalConfig::new(world_size)
        }
    }
}

impl Launch for Threads {
    /// What a GPU does depends on the number of ranks little, and an emulated one takes its time.
    fn world_sizes(&self) -> &[usize] {
        match self.devices[..] {
            [] => &[1, 2, 3, 4, 5],
            _ => &[2, 3],
        }
    }

    fn run<T: Send>(
        &self,
        world_size: usize,
        run: impl Fn(ProcessGroup) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        launch::threads_with(self.config(world_size), |world| {
            if let Some(device) = self.devices.get(world.rank() % self.devices.len().max(1)) {
                assert!(world.device().same_device(device));
            }
            run(world)
        })
    }
}
