//! Learning rate: linear warm-up, then a decay to a minimum.
//!
//! For step s from 0, W warm-up steps and S steps, with `min = min_lr_ratio * lr`: `lr * (s + 1) / W` for `s < W`, then
//! `min + (lr - min) * f(s)`, f being that of the [`LrDecay`].
//!
//! With a [`BatchRamp`](crate::BatchRamp) steps of fewer sequences count as the parts that they are of a step, so that the schedule follows the samples.

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
    fn left(self, step: f64, warmup_steps: f64, num_steps: f64) -> f64 {
        let after_warmup = (num_steps - warmup_steps).max(0.0);
        let last = match self {
            // Of whole steps a whole number.
            Self::Wsd(fraction) if num_steps.fract() == 0.0 => (fraction * num_steps).round(),
            Self::Wsd(fraction) => fraction * num_steps,
            _ => after_warmup,
        };
        let last = last.min(after_warmup);
        let done = (step - (warmup_steps + after_warmup - last)).max(0.0);
        let of = if last > 0.0 { last } else { 1.0 };
        let done = done.min(of);
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
    /// Of each step of a batch ramp how many steps it and those before it count as: [`Batches::ramp_progress`](crate::Batches::ramp_progress).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ramp: Vec<f64>,
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
            ramp: Vec::new(),
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

    /// How many steps the first `steps` count as.
    pub fn progress(&self, steps: usize) -> f64 {
        let num_ramp_steps = self.ramp.len();
        match steps.checked_sub(num_ramp_steps) {
            Some(more) => self.ramp.last().copied().unwrap_or_default() + more as f64,
            None => steps.checked_sub(1).map_or(0.0, |last| self.ramp[last]),
        }
    }

    /// The learning rate of `step`, counted from 0. It stays where it is from `num_steps` on.
    pub fn at(&self, step: usize) -> f64 {
        let (done, warmup) = (self.progress(step), self.warmup_steps as f64);
        if done < warmup {
            let after = self.progress(step.saturating_add(1)).min(warmup);
            return self.lr * after / warmup;
        }
        let min = self.min_lr_ratio * self.lr;
        let left = self.decay.left(done, warmup, self.progress(self.num_steps));
        min + (self.lr - min) * left
    }
}
