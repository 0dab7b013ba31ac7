//! Fine-tunes a Hugging Face checkpoint on text, Llama's or another family's, with tensor, pipeline and data parallel ranks: threads of
//! this process, or processes that a launcher started.
//!
//! Without arguments it fine-tunes a small bundled model, pre-trained on Shakespeare, on Alice in Wonderland. It takes the flags of
//! `candle-train finetune`, which go over what is written here.

use std::process::ExitCode;

use candle_core::DType;
use candle_train_cli::run_with_flags;
use candle_train_run::Finetune;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/shakespeare-llama");
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/alice.txt");

// Keeps the memory that a step frees for the next one.
#[global_allocator]
static ALLOCATOR: candle_train_run::Allocator = candle_train_run::ALLOCATOR;

fn main() -> ExitCode {
    // 2 x 2 x 2 ranks are no faster than one on a laptop; they show that the loss is the same.
    let mut run = Finetune::new(MODEL)
        .data(TEXT)
        .pp(2)
        .dp(2)
        .tp(2)
        .seq_len(128)
        .micro_batch_size(4)
        .global_batch_size(16)
        .lr(1e-3)
        .prompt("The Queen");
    // Whatever a flag says is a field, too.
    run.training.layout.dtype = Some(DType::F32);
    run.training.optimizer.warmup_steps = Some(5);
    run.training.optimizer.weight_decay = 0.1;
    run_with_flags("finetune_llama", &run)
}
