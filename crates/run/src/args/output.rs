//! Flags about the folder of the trained model.

use std::path::{Path, PathBuf};

use candle_core::DType;
use candle_parallel::checkpoint::HfSave;
use candle_train_models::GgufType;
use clap::Args;
use serde::Serialize;

use crate::args::choices::{float_type, some_by_name, some_float_type};
use crate::export::gguf::{GgufExport, GgufSource};

/// What happens where the trained model should go and something is there, or nothing can be written.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct OutputArgs {
    /// Folder for the trained model, or for the adapter
    #[arg(
        long,
        visible_alias = "output-dir",
        default_value = "finetuned",
        value_name = "DIR",
        help_heading = None
    )]
    pub output: PathBuf,
    /// Type of the saved weights [default: each tensor's own in the input checkpoint]
    #[arg(long, ignore_case = true, value_parser = float_type())]
    #[serde(serialize_with = "some_float_type")]
    pub save_dtype: Option<DType>,
    /// Replace a model in the folder of --output
    ///
    /// Without this, only one that an earlier run of the same command has made is replaced; the input model and folders with other files never
    /// are. The same holds for the file of --export-gguf.
    #[arg(long)]
    pub overwrite: bool,
    /// At the end also write the model as a GGUF file of this type, for llama.cpp and Ollama, beside the folder of --output: finetuned-q4_k_m.gguf for finetuned. An adapter is
    /// folded into its model
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    #[serde(serialize_with = "some_by_name")]
    pub export_gguf: Option<GgufType>,
    /// Where the model goes, to a new folder, if it cannot be saved to that of --output [default: beside the folder of the checkpoints if there is one, else beside that]
    #[arg(long, value_name = "DIR")]
    pub rescue_dir: Option<PathBuf>,
}

impl OutputArgs {
    /// The GGUF file that is written at the end, of what is saved: a model, or an adapter of the one in the folder `base`; `run` is what
    /// decides its weights.
    pub(crate) fn gguf_export(&self, base: Option<&Path>, run: Option<&str>) -> Option<GgufExport> {
        let dtype = self.export_gguf?;
        let mut name = self.output.file_name().unwrap_or_default().to_os_string();
        name.push(format!("-{}.gguf", dtype.name()));
        let saved = self.output.clone();
        Some(GgufExport {
            source: match base {
                Some(model) => GgufSource::Adapter {
                    model: model.to_path_buf(),
                    adapter: saved,
                },
                None => GgufSource::Model(saved),
            },
            output: self.output.with_file_name(name),
            dtype: Some(dtype),
            adapter_only: false,
            modelfile: false,
            overwrite: self.overwrite,
            run: run.map(|run| format!("{run} {}", dtype.name())),
        })
    }

    /// A save with these files beside the weights; `checkpoints` is the folder of the run's checkpoints.
    pub(crate) fn hf_save(
        &self,
        checkpoints: Option<&Path>,
        sidecars: Vec<(String, Vec<u8>)>,
    ) -> HfSave {
        let output = self.output.as_path();
        let beside = checkpoints.unwrap_or(output);
        let beside = || beside.parent().unwrap_or(beside).to_path_buf();
        HfSave {
            dtype: self.save_dtype,
            overwrite: self.overwrite,
            rescue_dir: Some(self.rescue_dir.clone().unwrap_or_else(beside)),
            ..HfSave::new(output, sidecars)
        }
    }
}
