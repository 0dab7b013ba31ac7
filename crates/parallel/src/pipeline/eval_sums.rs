//! What an evaluation adds up.

use std::ops::Add;

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

/// Sums over the targets of some micro-batches, of one rank or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalSums {
    /// The bits of the sum of the losses, which JSON has no number for if it is NaN or infinite.
    loss_bits: u64,
    /// Targets that have the largest logit; `None` if the model's last block does not tell.
    pub num_right: Option<f64>,
    /// Targets.
    pub num_targets: usize,
}

impl EvalSums {
    /// Of what the last block gave for a micro-batch: the sum of its losses, or that and the number of targets that have the largest
    /// logit.
    pub(super) fn of(output: &Tensor, num_targets: usize) -> Result<Self> {
        let numbers = output.to_dtype(DType::F64)?.flatten_all()?;
        let (loss, num_right) = match (output.rank(), numbers.to_vec1()?.as_slice()) {
            (0, &[loss]) => (loss, None),
            (1, &[loss, num_right]) => (loss, Some(num_right)),
            _ => bail!(
                "the last block returned shape {:?}; expected the sum of the losses of the micro-batch, (), or that and the number of \
                 targets with the largest logit, (2)",
                output.shape()
            ),
        };
        Ok(Self {
            loss_bits: f64::to_bits(loss),
            num_right,
            num_targets,
        })
    }

    /// The sum of the losses.
    pub fn loss(&self) -> f64 {
        f64::from_bits(self.loss_bits)
    }
}

impl Add for EvalSums {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let num_right = match (self.num_right, other.num_right) {
            (Some(own), Some(other)) => Some(own + other),
            (own, other) => own.or(other),
        };
        Self {
            loss_bits: (self.loss() + other.loss()).to_bits(),
            num_right,
            num_targets: self.num_targets + other.num_targets,
        }
    }
}
