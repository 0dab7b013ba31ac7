//! What `candle-train inspect` says of a folder that holds no checkpoint of a run.

mod facts;
mod gguf;
mod memory_table;

use std::path::Path;

use candle_comm::message_of;
use candle_core::{Result, bail};
use candle_parallel::checkpoint::{Checkpoint, TensorEntry, size_in_words};
use candle_parallel::{
    ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapter, LoraConfig, LoraTargets,
};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::counted;

use candle_train_run::print_line;
use facts::facts_of;
pub(crate) use gguf::inspect_gguf;
use memory_table::print_memory;

/// What of a folder is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The list of its tensors.
    pub tensors: bool,
    /// That all of them are read.
    pub verify: bool,
}

/// What is in `dir` if it is a model or an adapter.
///
/// # Errors
/// It is neither, which the error says with what was looked for; an adapter that cannot be read; what is found wrong where all is read.
pub(crate) fn inspect_model(dir: &Path, wanted: Wanted) -> Result<()> {
    if dir.join("config.json").is_file() {
        return model(dir, wanted);
    }
    if dir.join(ADAPTER_CONFIG_FILE).is_file() {
        return adapter(dir, wanted);
    }
    let is_empty = std::fs::read_dir(dir)?.next().is_none();
    let what = if is_empty { "is empty" } else { "has none" };
    bail!(
        "there is no checkpoint in {}: the folder {what}\nhint: a run writes them as step-000015 into its --save-dir after every --save-every \
         steps; until then there are none",
        dir.display()
    )
}

fn adapter(dir: &Path, wanted: Wanted) -> Result<()> {
    let adapter = Adapter::open(dir)?;
    print_line(&format!(
        "{} is an adapter as peft has it, and no checkpoint of a run: {}",
        dir.display(),
        lora_in_words(adapter.config())
    ));
    let weights = Checkpoint::open_file(dir, ADAPTER_WEIGHTS_FILE)?;
    print_tensors(&weights, wanted);
    if wanted.verify {
        let tensors = weights.tensors().iter();
        let read = tensors.map(|(name, tensor)| (name, weights.read(name, &tensor.shape, None)));
        verify_values(dir, read)?;
    }
    Ok(())
}

/// Says that all values of these tensors are finite, which are in `path`.
///
/// # Errors
/// One of them is not; tensors that cannot be read.
fn verify_values<'a>(
    path: &Path,
    tensors: impl ExactSizeIterator<Item = (&'a String, Result<Vec<f32>>)>,
) -> Result<()> {
    let tensors_in_words = counted(tensors.len(), "tensor");
    for (name, values) in tensors {
        if !values?.iter().all(|value| value.is_finite()) {
            bail!(
                "tensor {name} in {} has values that are NaN or infinite",
                path.display()
            );
        }
    }
    print_line(&format!(
        "verified: {tensors_in_words}, all values are finite"
    ));
    Ok(())
}

fn model(dir: &Path, wanted: Wanted) -> Result<()> {
    let config = ModelConfig::from_file(dir.join("config.json"));
    let weights = Checkpoint::open(dir);
    print_line(&format!(
        "{} is a model as transformers has it",
        dir.display()
    ));
    for (name, fact) in facts_of(dir, config.as_ref().ok(), weights.as_ref().ok())? {
        print_line(&format!("{name:<15}{fact}"));
    }
    if let Err(err) = &config {
        print_line(&format!("not supported: {}", message_of(err)));
    }
    if let Err(err) = &weights {
        print_line(&format!("no weights: {}", message_of(err)));
    }
    if let (Ok(config), Ok(_)) = (&config, &weights) {
        print_memory(config)?;
    }
    if let Ok(weights) = &weights {
        print_tensors(weights, wanted);
    }
    if wanted.verify {
        let (config, weights) = (config?, weights?);
        let num_weights = CausalLm::check_weights(&config, dir)?;
        let num_bytes: usize = weights.tensors().values().map(TensorEntry::num_bytes).sum();
        print_line(&format!(
            "verified: {} in {}, {}: all that config.json describes are there, in its shapes, and all values are finite (a model's folder \
             has no checksums)",
            counted(num_weights, "tensor"),
            counted(weights.num_files(), "file"),
            size_in_words(num_bytes as u64)
        ));
    }
    Ok(())
}

fn print_tensors(weights: &Checkpoint, wanted: Wanted) {
    for (name, tensor) in weights.tensors().iter().filter(|_| wanted.tensors) {
        let dtype = format!("{:?}", tensor.dtype).to_lowercase();
        print_line(&format!("  {name} {:?} {dtype}", tensor.shape));
    }
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
