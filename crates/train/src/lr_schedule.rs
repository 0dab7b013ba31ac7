//! Learning rate: linear warm-up, then a half cosine down to a minimum (arXiv:1608.03983 without restarts).
//!
//! For step s from 0, W warm-up steps and S steps, with `min = min_lr_ratio * lr`:
//! `lr * (s + 1) / W` for `s < W`, then `min + (lr - min) * (1 + cos(pi * (s - W) / max(1, S - W))) / 2`.

use std::f64::consts::PI;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// Warm-up and cosine decay of the learning rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedule {
    /// Highest learning rate, reached at the end of the warm-up.
    pub lr: f64,
    /// Lowest learning rate after the warm-up, as a fraction of `lr`.
    pub min_lr_ratio: f64,
    /// Steps of the warm-up, W.
    pub warmup_steps: usize,
    /// Steps of the whole run, S.
    pub num_steps: usize,
}

impl LrSchedule {
    /// # Errors
    /// `lr` is negative or not finite, or `min_lr_ratio` is outside 0..=1.
    pub fn validate(&self) -> Result<()> {
        if !self.lr.is_finite() || self.lr < 0.0 {
            bail!(
                "lr is {}, expected a finite number that is not negative",
                self.lr
            );
        }
        if !(0.0..=1.0).contains(&self.min_lr_ratio) {
            bail!(
                "min_lr_ratio is {}, expected a fraction from 0 to 1",
                self.min_lr_ratio
            );
        }
        Ok(())
    }

    /// The learning rate of `step`, counted from 0. It stays at the minimum from `num_steps` on.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let min = self.min_lr_ratio * self.lr;
        let decay_steps = self.num_steps.saturating_sub(self.warmup_steps).max(1);
        let done = (step - self.warmup_steps).min(decay_steps) as f64;
        min + (self.lr - min) * (1.0 + (PI * done / decay_steps as f64).cos()) / 2.0
    }
}
