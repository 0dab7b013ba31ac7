//! Flags about the folder of the trained model.

use std::path::{Path, PathBuf};

use candle_parallel::checkpoint::HfSave;
use clap::Args;

/// What happens where the trained model should go and something is there, or nothing can be written.
#[derive(Args, Clone, Debug)]
pub(crate) struct SaveArgs {
    /// Replace a model in the folder of --output
    ///
    /// Without this, only one that an earlier run of the same command has made is replaced; the input model and folders with other files never
    /// are.
    #[arg(long)]
    pub overwrite: bool,
    /// Where the model goes, to a new folder, if it cannot be saved to that of --output [default: beside the folder of the checkpoints if there is one, else beside that]
    #[arg(long, value_name = "DIR")]
    pub rescue_dir: Option<PathBuf>,
}

impl SaveArgs {
    /// A save to `output` with these files beside the weights; `checkpoints` is the folder of the run's checkpoints.
    pub fn hf_save(
        &self,
        (output, checkpoints): (&Path, Option<&Path>),
        sidecars: Vec<(String, Vec<u8>)>,
    ) -> HfSave {
        let beside = checkpoints.unwrap_or(output);
        let beside = || beside.parent().unwrap_or(beside).to_path_buf();
        HfSave {
            overwrite: self.overwrite,
            rescue_dir: Some(self.rescue_dir.clone().unwrap_or_else(beside)),
            ..HfSave::new(output, sidecars)
        }
    }
}
