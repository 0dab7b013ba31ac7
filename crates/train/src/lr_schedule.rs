//! Learning rate: linear warm-up, then a decay to a minimum.
//!
//! For step s from 0, W warm-up steps and S steps, with `min = min_lr_ratio * lr`: `lr * (s + 1) / W` for `s < W`, then
//! `min + (lr - min) * f(s)`, f being that of the [`LrDecay`].

use std::f64::consts::PI;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// What is left at step s of what the learning rate has above its minimum, f(s), with `x = (s - W) / max(1, S - W)` at most 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LrDecay {
    /// Half a cosine, `(1 + cos(pi x)) / 2` (arXiv:1608.03983 without restarts).
    #[default]
    Cosine,
    /// `1 - x`
    Linear,
    /// 1: no decay.
    Constant,
    /// Warm-up, stable, decay (arXiv:2404.06395): 1, and over the last steps, this fraction of S, linearly down.
    Wsd(f64),
}

impl LrDecay {
    fn left(self, step: usize, warmup_steps: usize, num_steps: usize) -> f64 {
        let after_warmup = num_steps.saturating_sub(warmup_steps);
        let last = match self {
            Self::Wsd(fraction) => (fraction * num_steps as f64).round() as usize,
            _ => after_warmup,
        };
        let last = last.min(after_warmup);
        let done = step.saturating_sub(warmup_steps + after_warmup - last);
        let (done, of) = (done.min(last.max(1)) as f64, last.max(1) as f64);
        match self {
            Self::Cosine => (1.0 + (PI * done / of).cos()) / 2.0,
            Self::Linear | Self::Wsd(_) => 1.0 - done / of,
            Self::Constant => 1.0,
        }
    }
}

/// Warm-up and decay of the learning rate.
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
    /// How it falls after the warm-up.
    #[serde(default)]
    pub decay: LrDecay,
}

impl LrSchedule {
    /// `lr` in every step, without warm-up or decay.
    pub fn constant(lr: f64, num_steps: usize) -> Self {
        Self {
            lr,
            min_lr_ratio: 1.0,
            warmup_steps: 0,
            num_steps,
            decay: LrDecay::Constant,
        }
    }

    /// # Errors
    /// `lr` is negative or not finite, or `min_lr_ratio` or the fraction of [`LrDecay::Wsd`] is outside 0..=1.
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
        match self.decay {
            LrDecay::Wsd(fraction) if !(0.0..=1.0).contains(&fraction) => bail!(
                "the decay of a WSD schedule takes {fraction} of the steps, expected a fraction from 0 to 1"
            ),
            _ => Ok(()),
        }
    }

    /// The learning rate of `step`, counted from 0. It stays where it is from `num_steps` on.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup_steps {
            return self.lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let min = self.min_lr_ratio * self.lr;
        let left = self.decay.left(step, self.warmup_steps, self.num_steps);
        min + (self.lr - min) * left
    }
}
