//! What `candle-train inspect` says of a folder that holds no checkpoint of a run.

use std::path::Path;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::Checkpoint;
use candle_parallel::{ADAPTER_CONFIG_FILE, Adapter, LoraConfig, LoraTargets};
use candle_train::counted;

use crate::output::print_line;

/// What is in `dir` if it is a model or an adapter.
///
/// # Errors
/// It is neither, which the error says with what was looked for; a model or an adapter that cannot be read.
pub(crate) fn inspect_model(dir: &Path) -> Result<()> {
    if dir.join(ADAPTER_CONFIG_FILE).is_file() {
        let adapter = Adapter::open(dir)?;
        print_line(&format!(
            "{} is an adapter as peft has it, and no checkpoint of a run: {}",
            dir.display(),
            lora_in_words(adapter.config())
        ));
        return Ok(());
    }
    if dir.join("config.json").is_file() {
        let model = Checkpoint::open(dir)?;
        let tensors = model.tensors();
        let num_values: usize = tensors
            .values()
            .map(|tensor| tensor.shape.iter().product::<usize>())
            .sum();
        print_line(&format!(
            "{} is a model as transformers has it, and no checkpoint of a run: {} of {}:",
            dir.display(),
            counted(tensors.len(), "tensor"),
            counted(num_values, "value")
        ));
        for (name, tensor) in tensors {
            let dtype = format!("{:?}", tensor.dtype).to_lowercase();
            print_line(&format!("  {name} {:?} {dtype}", tensor.shape));
        }
        return Ok(());
    }
    let is_empty = std::fs::read_dir(dir)?.next().is_none();
    let what = if is_empty { "is empty" } else { "has none" };
    bail!(
        "there is no checkpoint in {}: the folder {what}\nhint: a run writes them as step-000015 into its --save-dir after every --save-every \
         steps; until then there are none",
        dir.display()
    )
}

/// What adapters are, in words.
pub(crate) fn lora_in_words(lora: &LoraConfig) -> String {
    let LoraConfig {
        rank,
        alpha,
        dropout,
        targets,
        use_rslora,
        base_model,
        ..
    } = lora;
    let targets = match targets {
        LoraTargets::AllLinear => "all linear layers".to_string(),
        LoraTargets::Names(names) => names.join(", "),
    };
    let scale = if *use_rslora { " (rsLoRA)" } else { "" };
    let base = base_model
        .as_ref()
        .map_or(String::new(), |base| format!(", of the model {base}"));
    format!("rank {rank}, alpha {alpha}{scale}, dropout {dropout}, beside {targets}{base}")
}
