//! Trains a small Llama and its tokenizer from nothing on text, and writes a Hugging Face checkpoint. It is
//! `candle-train pretrain` where `--data` need not be given.
//!
//! The bundled model of `finetune_llama` was made with it: see `assets/README.md`.

use std::process::ExitCode;

use candle_train_cli::run_with_flags;
use candle_train_run::Pretrain;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tinyshakespeare.txt");

#[global_allocator]
static ALLOCATOR: candle_train_run::Allocator = candle_train_run::ALLOCATOR;

fn main() -> ExitCode {
    run_with_flags("pretrain_llama", &Pretrain::new().data(TEXT))
}
