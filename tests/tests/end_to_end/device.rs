//! Where the ranks of these tests compute: on the CPU, or where the environment variable `CANDLE_TRAIN_TEST_DEVICE` says, which
//! is `cuda` (all GPUs, which the ranks take in turn) or `cuda:N` (one GPU for all).

use std::sync::OnceLock;

use candle_core::Device;
use candle_ops::DeviceChoice;

const VARIABLE: &str = "CANDLE_TRAIN_TEST_DEVICE";

/// More ranks than any test has.
const MAX_RANKS: usize = 64;

/// The devices that ranks take in turn, opened once.
pub fn devices() -> Vec<Device> {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    let open = || {
        let name = std::env::var(VARIABLE).unwrap_or("cpu".to_string());
        let choice: DeviceChoice = name.parse().unwrap();
        choice.open_for(MAX_RANKS).unwrap()
    };
    DEVICES.get_or_init(open).clone()
}
