//! The memory that training a model takes on one device, beside the flags that it takes so much with.

use candle_core::Result;
use candle_parallel::{MemoryCategory, MemoryReport};
use candle_train_models::ModelConfig;
use candle_train_run::{Finetune, print_line};
use candle_trainer::memory_in_words;
use toml::Value;

/// Tokens of a micro-batch, or the model's context if that is shorter.
const NUM_TOKENS: usize = 2048;

/// Ways to train.
const WAYS: [&str; 4] = [
    "--dtype f32",
    "--dtype bf16",
    "--dtype bf16 --lora-rank 16",
    "--dtype bf16 --lora-rank 16 --base-dtype q4k",
];

const COLUMNS: [MemoryCategory; 4] = [
    MemoryCategory::Weights,
    MemoryCategory::Gradients,
    MemoryCategory::Optimizer,
    MemoryCategory::Activations,
];

/// Prints a line for each way.
///
/// # Errors
/// Numbers of the model that do not fit each other.
pub(super) fn print_memory(config: &ModelConfig) -> Result<()> {
    let num_tokens = NUM_TOKENS.min(config.max_seq_len());
    print_line(&format!(
        "memory to train it on one device, with micro-batches of 1 sequence of {num_tokens} tokens, without what is being computed:"
    ));
    let heads = COLUMNS.map(|category| category.to_string());
    print_row("", &[heads.to_vec(), vec!["in all".to_string()]].concat());
    for flags in WAYS {
        let memory = memory_with(flags, config, num_tokens)?;
        let bytes = COLUMNS.map(|category| memory.of(category).peak);
        let total = bytes.iter().sum::<u64>();
        let bytes = bytes.iter().chain([&total]);
        let sizes: Vec<String> = bytes.map(|bytes| memory_in_words(*bytes)).collect();
        print_row(flags, &sizes);
    }
    Ok(())
}

fn print_row(flags: &str, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>12}")).collect();
    print_line(&format!("  {flags:<44}{}", cells.concat()));
}

/// The memory of each category of a run with these flags, whose micro-batches have `num_tokens`.
fn memory_with(flags: &str, config: &ModelConfig, num_tokens: usize) -> Result<MemoryReport> {
    let given = flags
        .split("--")
        .filter_map(|flag| flag.trim().split_once(' '));
    let given = given.map(|(flag, value)| (flag.to_string(), Value::from(value)));
    let run = Finetune::from_table(&given.collect())?;
    let spec = run
        .seq_len(num_tokens)
        .global_batch_size(1)
        .spec(config, 1)?;
    let model = spec.model()?;
    let plan = spec.memory_plan(&model, &model.of_rank(0))?;
    Ok(plan.report())
}
