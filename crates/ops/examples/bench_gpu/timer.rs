//! Time of one call among many.

use candle_core::{Device, Result};
use candle_ops::Stopwatch;

const WARM_UP: usize = 3;
const ROUNDS: usize = 5;
const CALLS: usize = 4;

/// Seconds of a call, by the device's clock: the median of a few rounds of calls without a pause.
pub fn secs_of_call(device: &Device, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..WARM_UP {
        call()?;
    }
    let mut secs = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let mut stopwatch = Stopwatch::default();
        stopwatch.time(device, || (0..CALLS).try_for_each(|_| call()))?;
        secs.push(stopwatch.take_secs()? / CALLS as f64);
    }
    secs.sort_by(f64::total_cmp);
    Ok(secs[ROUNDS / 2])
}
