//! The program `candle-train`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: candle_train_run::Allocator = candle_train_run::ALLOCATOR;

fn main() -> ExitCode {
    candle_train_cli::candle_train()
}
