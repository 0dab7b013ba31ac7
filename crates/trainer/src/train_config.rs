//! What a training run needs to know beside the model, the data and the mesh.

use candle_core::{Result, bail};
use candle_parallel::{AdamWConfig, LossScaling, Schedule};
use serde::{Deserialize, Serialize};

use crate::lr_schedule::LrSchedule;

/// Configuration of a [`crate::Trainer`]: `TrainConfig { adamw, ..TrainConfig::new(lr_schedule) }`, as later versions have more fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Learning rate of each step.
    pub lr_schedule: LrSchedule,
    /// Constants of the optimizer.
    pub adamw: AdamWConfig,
    /// Gradients are scaled down to this global L2 norm; `None`: never.
    pub max_grad_norm: Option<f64>,
    /// How the loss scale changes; counts for models that compute in f16.
    #[serde(default)]
    pub loss_scaling: LossScaling,
    /// Order of the micro-batches in the pipeline.
    pub schedule: Schedule,
    /// Receives that a pipeline rank posts ahead: see [`Pipeline::with_prefetch`](candle_parallel::Pipeline::with_prefetch).
    pub pipeline_prefetch: usize,
}

impl TrainConfig {
    /// AdamW with its usual constants, gradients clipped to a norm of 1, 1F1B.
    pub fn new(lr_schedule: LrSchedule) -> Self {
        Self {
            lr_schedule,
            adamw: AdamWConfig::default(),
            max_grad_norm: Some(1.0),
            loss_scaling: LossScaling::default(),
            schedule: Schedule::OneForwardOneBackward,
            pipeline_prefetch: 1,
        }
    }

    /// An error that names the first field which is out of its range.
    ///
    /// # Errors
    /// The first field out of its range.
    pub fn validate(&self) -> Result<()> {
        self.lr_schedule.validate()?;
        self.adamw.validate()?;
        self.loss_scaling.validate()?;
        match self.max_grad_norm {
            Some(norm) if !(norm > 0.0 && norm.is_finite()) => {
                bail!("max_grad_norm is {norm}; expected a positive number")
            }
            _ => Ok(()),
        }
    }
}
