//! Dynamic loss scaling (arXiv:1710.03740, section 3.2).
//!
//! f16 has no numbers below 2^-24, where many of the gradients lie that a backward pass hands from block to block. So the gradient of
//! the loss begins as a power of two in place of 1, and the gradients of the weights, in f32, are divided by it: exact both times. As
//! the loss is the sum over the targets, the scale is that of a target's loss, whatever the size of the batch.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// How the loss scale changes: an overflow halves it, many good steps in a row double it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossScaling {
    /// The first scale, a power of two from 1 to 2^40.
    pub init: f64,
    /// Good steps in a row before the scale doubles.
    pub window: usize,
}

impl Default for LossScaling {
    /// What 2^16, a usual first scale of the mean over a batch, is to each target of a batch of 256.
    fn default() -> Self {
        Self {
            init: 256.0,
            window: 2000,
        }
    }
}

impl LossScaling {
    /// An error that names the first number which is out of its range.
    ///
    /// # Errors
    /// The first number out of its range.
    pub fn validate(&self) -> Result<()> {
        let is_power_of_two = self.init.log2().fract() == 0.0;
        if !(1.0..=LARGEST).contains(&self.init) || !is_power_of_two {
            bail!(
                "the first loss scale is {}; expected a power of two from 1 to 2^40",
                self.init
            );
        }
        if self.window == 0 {
            bail!("the loss scale's window is 0; expected 1 or more steps");
        }
        Ok(())
    }
}

/// With it even the smallest number of f16 is infinite.
const LARGEST: f64 = (1u64 << 40) as f64;

/// What changes of a [`LossScaler`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LossScale {
    scale: f64,
    /// Since the last change of the scale.
    num_good: usize,
    num_skipped: usize,
}

/// The loss scale of a run: the same on every rank, as it follows from sums over all of them.
#[derive(Clone, Debug)]
pub(crate) struct LossScaler {
    config: LossScaling,
    pub now: LossScale,
}

impl LossScaler {
    pub fn new(config: LossScaling) -> Self {
        Self {
            config,
            now: LossScale {
                scale: config.init,
                num_good: 0,
                num_skipped: 0,
            },
        }
    }

    pub fn scale(&self) -> f64 {
        self.now.scale
    }

    pub fn num_skipped(&self) -> usize {
        self.now.num_skipped
    }

    /// After a step whose loss and gradients were finite.
    pub fn grow(&mut self) {
        self.now.num_good += 1;
        if self.now.num_good >= self.config.window {
            self.now.num_good = 0;
            self.now.scale = (2.0 * self.now.scale).min(LARGEST);
        }
    }

    /// After a step that overflowed: whether it is to be skipped, and the next tried with half the scale. A scale of 1 has no half.
    pub fn shrink(&mut self) -> bool {
        if self.now.scale <= 1.0 {
            return false;
        }
        self.now.num_good = 0;
        self.now.num_skipped += 1;
        self.now.scale /= 2.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{LARGEST, LossScaler, LossScaling};

    #[test]
    fn an_overflow_halves_the_scale_and_a_window_of_good_steps_doubles_it() {
        let mut scaler = LossScaler::new(LossScaling {
            init: 4.0,
            window: 3,
        });
        // Good steps and overflows, and the scale after each.
        for (step, (is_good, scale)) in [
            (true, 4.0),
            (true, 4.0),
            (false, 2.0),
            (true, 2.0),
            (true, 2.0),
            (true, 4.0),
            (true, 4.0),
            (false, 2.0),
            (false, 1.0),
        ]
        .into_iter()
        .enumerate()
        {
            match is_good {
                true => scaler.grow(),
                false => assert!(scaler.shrink()),
            }
            assert_eq!(scaler.scale(), scale, "after step {step}");
        }
        assert!(!scaler.shrink());
        assert_eq!((scaler.scale(), scaler.num_skipped()), (1.0, 3));
    }

    #[test]
    fn the_scale_ends_at_the_largest() {
        let mut scaler = LossScaler::new(LossScaling {
            init: LARGEST,
            window: 1,
        });
        scaler.grow();
        assert_eq!(scaler.scale(), LARGEST);
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        for (init, window, expected) in [
            (3.0, 1, "the first loss scale is 3;"),
            (0.5, 1, "the first loss scale is 0.5;"),
            (2.0 * LARGEST, 1, "expected a power of two from 1 to 2^40"),
            (f64::NAN, 1, "the first loss scale is NaN;"),
            (1.0, 0, "window is 0"),
        ] {
            let err = LossScaling { init, window }.validate().unwrap_err();
            assert!(err.to_string().contains(expected), "{err}");
        }
        LossScaling::default().validate().unwrap();
    }
}
