//! Flags of dynamic loss scaling.

use candle_core::{DType, Result, bail};
use candle_parallel::LossScaling;
use clap::Args;
use serde::Serialize;

use crate::args::number::whole;

/// How the loss scale of f16 changes.
#[derive(Args, Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LossScaleArgs {
    /// What f16 multiplies each token's loss by in the first step, a power of two; an overflow skips a step and halves it [default: 256]
    #[arg(long, value_name = "SCALE", value_parser = whole::<u64>(1..))]
    pub loss_scale_init: Option<u64>,
    /// Steps in a row without overflow that double it [default: 2000]
    #[arg(long, value_name = "STEPS", value_parser = whole::<usize>(1..))]
    pub loss_scale_window: Option<usize>,
}

impl LossScaleArgs {
    /// The configuration for training in `dtype`; flags that would do nothing are an error.
    ///
    /// # Errors
    /// Such a flag.
    pub fn config(self, dtype: DType) -> Result<LossScaling> {
        let default = LossScaling::default();
        let config = LossScaling {
            init: self
                .loss_scale_init
                .map_or(default.init, |init| init as f64),
            window: self.loss_scale_window.unwrap_or(default.window),
        };
        let flag = match (self.loss_scale_init, self.loss_scale_window) {
            (Some(_), _) => "--loss-scale-init",
            (None, Some(_)) => "--loss-scale-window",
            (None, None) => return Ok(config),
        };
        if dtype != DType::F16 {
            bail!("{flag} is for --dtype f16: other types have no loss scale");
        }
        config.validate().map_err(|err| err.context(flag))?;
        Ok(config)
    }
}
