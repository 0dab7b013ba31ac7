//! Trains a small Llama and its tokenizer from nothing on text, and writes a Hugging Face checkpoint. It is
//! `candle-train pretrain` where `--data` need not be given.
//!
//! The bundled model of `finetune_llama` was made with it: see `assets/README.md`.

use std::process::ExitCode;

use candle_train_cli::{FlagDefault, Pretrain, run_with_defaults};

const DATA: FlagDefault = FlagDefault {
    flag: "data",
    value: concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tinyshakespeare.txt"),
    description: "the bundled plays of Shakespeare",
    unless: None,
};

#[global_allocator]
static ALLOCATOR: candle_train_cli::Allocator = candle_train_cli::ALLOCATOR;

fn main() -> ExitCode {
    let mut defaults = Pretrain::defaults();
    defaults.push(DATA);
    run_with_defaults::<Pretrain>("pretrain_llama", &defaults)
}
