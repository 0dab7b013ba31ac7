//! What is not trained on, for evaluation.

use candle_core::{Result, bail};

use super::sample_order::permutation;
use crate::words::counted;

/// Epoch whose permutation chooses it: no run gets there.
const EPOCH: u64 = u64::MAX;

/// Which of `num_records` a run trains on, and which it holds out: `fraction` of them, rounded, but at least one,
/// chosen by `seed`. Both in rising order.
///
/// # Errors
/// A fraction that leaves none to train on.
pub(crate) fn held_out(num_records: usize, fraction: f64, seed: u64) -> Result<[Vec<usize>; 2]> {
    let num_held_out = ((num_records as f64 * fraction).round() as usize).max(1);
    if num_held_out >= num_records {
        bail!(
            "{fraction} of {} leaves none to train on\nhint: give more data, or other data for the evaluation",
            counted(num_records, "record")
        );
    }
    let mut order = permutation(num_records, seed, EPOCH);
    let mut training = order.split_off(num_held_out);
    order.sort_unstable();
    training.sort_unstable();
    Ok([training, order])
}
