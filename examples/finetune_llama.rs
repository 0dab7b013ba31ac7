//! Fine-tunes a Hugging Face checkpoint on text, Llama's or another family's, with tensor, pipeline and data parallel ranks: threads of
//! this process, or processes that a launcher started. It is `candle-train finetune` where `--model` and `--data` need not be given.
//!
//! Without arguments it fine-tunes a small bundled model, pre-trained on Shakespeare, on Alice in Wonderland.

use std::process::ExitCode;

use candle_train_cli::{Finetune, FlagDefault, run_with_defaults};

const MODEL: FlagDefault = FlagDefault {
    flag: "model",
    value: concat!(env!("CARGO_MANIFEST_DIR"), "/assets/shakespeare-llama"),
    description: "the bundled model",
};

const DATA: FlagDefault = FlagDefault {
    flag: "data",
    value: concat!(env!("CARGO_MANIFEST_DIR"), "/assets/alice.txt"),
    description: "the bundled text",
};

#[global_allocator]
static ALLOCATOR: candle_train_cli::Allocator = candle_train_cli::ALLOCATOR;

fn main() -> ExitCode {
    run_with_defaults::<Finetune>("finetune_llama", &[MODEL, DATA])
}
