//! The program `candle-train`.

use std::process::ExitCode;

fn main() -> ExitCode {
    candle_train_cli::candle_train()
}
