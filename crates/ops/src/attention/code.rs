//! Which code computes attention of whole sequences.

use crate::settings::attention_code::AttentionCode;
use crate::settings::gpu_settings::GpuSettings;
use candle_core::{DType, Device, Result};

impl AttentionCode {
    /// What computes attention of values of this type on this device, where queries and keys are whole sequences or parts of them that see all of each
    /// other, of sizes that cuDNN takes; others are left to [`Self::Own`].
    ///
    /// # Errors
    /// When a variable has a value that means nothing.
    pub fn of_whole(device: &Device, dtype: DType) -> Result<Self> {
        if device.is_cpu() {
            return Ok(Self::Cpu);
        }
        let is_refused = GpuSettings::get()?.attention == Some(Self::Own);
        let is_narrow = matches!(dtype, DType::BF16 | DType::F16);
        #[cfg(feature = "cudnn")]
        let is_there = crate::cuda::cudnn_library::is_there();
        #[cfg(not(feature = "cudnn"))]
        let is_there = false;
        Ok(match is_there && is_narrow && !is_refused {
            true => Self::Cudnn,
            false => Self::Own,
        })
    }
}
