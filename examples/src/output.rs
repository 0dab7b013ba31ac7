//! How a program ends.

use std::process::ExitCode;

use candle_core::Result;

/// Prints an error as a sentence and turns it into a non-zero exit code.
pub fn exit_with(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("error: {err}");
            ExitCode::FAILURE
        }
    }
}
