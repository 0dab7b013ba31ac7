//! Fine-tunes a Hugging Face checkpoint on text, Llama's or another family's, with tensor, pipeline and data parallel ranks: threads of
//! this process, or processes that a launcher started. It is `candle-train finetune` where `--model` and `--data` need not be given.
//!
//! Without arguments it fine-tunes a small bundled model, pre-trained on Shakespeare, on Alice in Wonderland.

use std::process::ExitCode;

use candle_train_cli::{Finetune, FlagDefault, run_with_defaults};

/// The bundled model and text, and, for that model only, a run of a minute that shows everything.
const DEFAULTS: [FlagDefault; 11] = [
    bundled(
        "model",
        concat!(env!("CARGO_MANIFEST_DIR"), "/assets/shakespeare-llama"),
        "the bundled model",
    ),
    bundled(
        "data",
        concat!(env!("CARGO_MANIFEST_DIR"), "/assets/alice.txt"),
        "the bundled text",
    ),
    of_bundled("tp", "2"),
    of_bundled("pp", "2"),
    of_bundled("dp", "2"),
    of_bundled("seq-len", "128"),
    of_bundled("micro-batch-size", "4"),
    of_bundled("lr", "1e-3"),
    of_bundled("warmup-steps", "5"),
    of_bundled("weight-decay", "0.1"),
    of_bundled("prompt", "The Queen"),
];

const fn bundled(
    flag: &'static str,
    value: &'static str,
    description: &'static str,
) -> FlagDefault {
    FlagDefault {
        flag,
        value,
        description,
        unless: None,
    }
}

const fn of_bundled(flag: &'static str, value: &'static str) -> FlagDefault {
    FlagDefault {
        flag,
        value,
        description: "with the bundled model one for it, else that of candle-train finetune",
        unless: Some("model"),
    }
}

#[global_allocator]
static ALLOCATOR: candle_train_cli::Allocator = candle_train_cli::ALLOCATOR;

fn main() -> ExitCode {
    run_with_defaults::<Finetune>("finetune_llama", &DEFAULTS)
}
