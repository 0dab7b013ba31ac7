//! `candle-train merge`

use std::path::PathBuf;

use candle_core::{DType, Result};
use candle_parallel::Adapter;
use candle_parallel::checkpoint::{
    Checkpoint, HfSave, merge_adapter, sidecar_files, with_config_dtype,
};
use candle_train_run::{CONFIG_FILE, float_type, print_line, resolve_base};
use candle_trainer::{Activity, ChatTemplate, Tokenizer, counted};
use clap::Args;

/// Fold a low-rank adapter into the model that it was trained on
#[derive(Args, Debug)]
pub(crate) struct Merge {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub [default: the model that the adapter notes, if it is here]
    #[arg(long, value_name = "DIR|REPO")]
    model: Option<String>,
    /// Folder of the adapter, as finetune --lora-rank or peft saves it
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Folder for the model with the adapter folded in
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Type of the saved weights [default: each tensor's own in the checkpoint]
    #[arg(long, ignore_case = true, value_parser = float_type())]
    save_dtype: Option<DType>,
    /// Replace a model in the folder of --output
    #[arg(long)]
    overwrite: bool,
}

impl Merge {
    /// Does what the flags say.
    pub fn run(&self) -> Result<()> {
        let model = resolve_base(&self.adapter, self.model.as_deref())?;
        let dtype = self.save_dtype;
        let mut sidecars = with_config_dtype(sidecar_files(&model)?, dtype)?;
        sidecars.retain(|(name, _)| name != CONFIG_FILE);
        let tokenizer = Tokenizer::from_dir(&model);
        let template = tokenizer.as_ref().ok().map(|tokenizer| {
            ChatTemplate::in_place_of_own(Some(&model), None, Some(&self.adapter), tokenizer)
        });
        if let (Some(template), Ok(tokenizer)) = (template.transpose()?.flatten(), tokenizer) {
            template.save_among(&mut sidecars, &tokenizer)?;
        }
        let save = HfSave {
            dtype,
            overwrite: self.overwrite,
            inputs: vec![model.clone(), self.adapter.clone()],
            ..HfSave::new(&self.output, sidecars)
        };
        let adapter = Adapter::open(&self.adapter)?;
        let written = save.num_written_bytes.clone();
        let writing = Activity::of_bytes("folding the adapter in", None, written);
        let num_layers = merge_adapter(&Checkpoint::open(&model)?, &adapter, &save)?;
        drop(writing);
        print_line(&format!(
            "{} of {} with adapters folded in\nsaved to {}",
            counted(num_layers, "layer"),
            model.display(),
            self.output.display()
        ));
        Ok(())
    }
}
