//! What the last block of a model gives.

use candle_core::{Result, Tensor, bail};

/// The losses of a micro-batch. A step trains on the sum of these sums over the global batch, divided by the sum of the counts.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Their sum, a scalar. From a [`PlainHead`](crate::PlainHead) it is in candle's graph.
    pub sum: Tensor,
    /// What their mean is over: targets, images, pairs of answers.
    pub count: f64,
    /// How many predictions are right, a scalar, if that is known: an evaluation tells the fraction.
    pub num_right: Option<Tensor>,
}

impl Loss {
    /// The sum of `count` losses.
    pub fn new(sum: Tensor, count: f64) -> Self {
        Self {
            sum,
            count,
            num_right: None,
        }
    }

    /// The losses, if their count can be one.
    pub(crate) fn checked(self) -> Result<Self> {
        if self.count >= 0.0 && self.count.is_finite() {
            return Ok(self);
        }
        bail!(
            "the last block gave a Loss whose count is {}; expected what the mean is over, a finite number >= 0",
            self.count
        )
    }
}
