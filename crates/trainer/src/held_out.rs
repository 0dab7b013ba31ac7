//! Samples that are not trained on, for evaluation.

use std::sync::Arc;

use candle_core::{Result, bail};

use crate::sample_order::permutation;

/// Epoch whose permutation chooses them: no run gets there.
const EPOCH: u64 = u64::MAX;

/// Numbers of the samples of a data set that a run trains on, and of those that it holds out: `fraction` of them, rounded, but at least
/// one, chosen by `seed`. Both in rising order.
///
/// # Errors
/// A fraction that leaves none to train on.
pub fn held_out(num_samples: usize, fraction: f64, seed: u64) -> Result<[Arc<[usize]>; 2]> {
    let num_held_out = ((num_samples as f64 * fraction).round() as usize).max(1);
    if num_held_out >= num_samples {
        bail!(
            "{fraction} of {num_samples} samples leaves none to train on\nhint: give more data, or other data for the evaluation"
        );
    }
    let mut order = permutation(num_samples, seed, EPOCH);
    let mut training = order.split_off(num_held_out);
    order.sort_unstable();
    training.sort_unstable();
    Ok([training.into(), order.into()])
}
