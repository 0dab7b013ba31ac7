//! Where the ranks of these tests compute: on the CPU, or where the environment variable `CANDLE_TRAIN_TEST_DEVICE` says, which
//! is `cuda` (all GPUs, which the ranks take in turn) or `cuda:N` (one GPU for all).

use std::cell::RefCell;
use std::sync::OnceLock;

use candle_comm::launch::threads_with;
use candle_comm::{LocalConfig, ProcessGroup};
use candle_core::{Device, Result};
use candle_ops::DeviceChoice;

const VARIABLE: &str = "CANDLE_TRAIN_TEST_DEVICE";

/// More ranks than any test has.
const MAX_RANKS: usize = 64;

thread_local! {
    /// That of the rank which runs on this thread.
    static OF_RANK: RefCell<Option<Device>> = const { RefCell::new(None) };
}

/// The devices that ranks take in turn, opened once.
fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let name = std::env::var(VARIABLE).unwrap_or("cpu".to_string());
        let choice: DeviceChoice = name.parse().unwrap();
        choice.open_for(MAX_RANKS).unwrap()
    })
}

/// The device of the rank on this thread; outside of any rank the first.
pub fn device() -> Device {
    let of_rank = OF_RANK.with_borrow(Clone::clone);
    of_rank.unwrap_or_else(|| devices()[0].clone())
}

/// Runs every rank of a group; results in rank order.
pub fn on_ranks<T: Send>(
    world_size: usize,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Vec<T> {
    on_ranks_with_delays(world_size, None, run)
}

/// As [`on_ranks`], with random delays before each operation.
pub fn on_ranks_with_delays<T: Send>(
    world_size: usize,
    delays: Option<u64>,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Vec<T> {
    let config = LocalConfig {
        delays,
        devices: devices().to_vec(),
        ..LocalConfig::new(world_size)
    };
    let rank = |world: ProcessGroup| {
        OF_RANK.set(Some(world.device().clone()));
        run(world)
    };
    threads_with(config, rank).unwrap()
}
