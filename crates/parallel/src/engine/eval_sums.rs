//! Sums of an evaluation.

use std::ops::Add;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::agreement::gather;
use crate::pass::Loss;

/// Sums over the targets of some micro-batches, of one rank or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EvalSums {
    /// The bits of the sum of the losses, which JSON has no number for if it is NaN or infinite.
    loss_bits: u64,
    /// Targets that have the largest logit; `None` if the model's last block does not tell.
    pub num_right: Option<f64>,
    /// Targets, or what else the mean is over.
    pub num_targets: f64,
}

impl EvalSums {
    /// The sums of one micro-batch.
    pub(super) fn of(loss: &Loss) -> Result<Self> {
        let number = |scalar: &Tensor| scalar.to_dtype(DType::F64)?.to_scalar::<f64>();
        Ok(Self {
            loss_bits: number(&loss.sum)?.to_bits(),
            num_right: loss.num_right.as_ref().map(number).transpose()?,
            num_targets: loss.count,
        })
    }

    /// The sums of all ranks, of which those of a tensor-parallel group have the same. Every rank must call it.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn of_all(self, mesh: &Mesh) -> Result<Self> {
        let counts = mesh.tp.rank() == 0;
        let own = if counts { self } else { Self::default() };
        let all: Vec<Self> = gather(&mesh.world, &own)?;
        Ok(all.into_iter().fold(Self::default(), Self::add))
    }

    /// The sum of the losses.
    pub fn loss(&self) -> f64 {
        f64::from_bits(self.loss_bits)
    }

    /// The mean loss; NaN without targets, as on ranks without the last stage.
    pub fn mean(&self) -> f64 {
        self.loss() / self.num_targets
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
