//! Checkpoints with the values before they were rounded.

use candle_core::Result;

use super::distributed::DistributedOptimizer;
use crate::checkpoint::{HfSave, save_with_masters};

impl DistributedOptimizer {
    /// As [`save_hf`](crate::checkpoint::save_hf), but for weights that are stored in another type than they have here, such as
    /// f32 after training in bf16: their f32 masters are written. Every rank must call it.
    ///
    /// # Errors
    /// As [`save_hf`](crate::checkpoint::save_hf).
    pub fn save_hf(&self, save: &HfSave) -> Result<()> {
        save_with_masters(&self.params, &self.mesh, save, |index| self.master(index))
    }
}
