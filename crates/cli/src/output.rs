//! What a program prints, and how it ends.

use std::io::Write;
use std::process::ExitCode;

use candle_comm::message_of;
use candle_core::{Error, Result};
use candle_launch::{RankEnv, WOULD_FAIL_AGAIN_EXIT_CODE};

/// Prints a line on stdout. A reader that has gone away (`| head`) does not end a run: errors are ignored.
pub fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints an error as a sentence, with its hints below, and turns it into a non-zero exit code.
pub fn exit_with(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            print_error(&err);
            ExitCode::FAILURE
        }
    }
}

/// Prints an error as a sentence, with its hints below.
pub(crate) fn print_error(err: &Error) {
    let _ = writeln!(std::io::stderr(), "error: {}", sentence(&message_of(err)));
}

/// The exit code of a run that was refused before its first step: starting it again would not help, unless it was able to start before.
pub(crate) fn exit_code_of_refusal(env: &RankEnv) -> ExitCode {
    match env.num_restarts() {
        0 => ExitCode::from(WOULD_FAIL_AGAIN_EXIT_CODE),
        _ => ExitCode::FAILURE,
    }
}

/// What candle writes as one line for each context of an error, outermost first, becomes one line. Hints and indented
/// details stay below it.
fn sentence(message: &str) -> String {
    let mut sentence = String::new();
    let mut is_detail = false;
    for line in message.lines() {
        is_detail |= line.starts_with("hint:") || line.starts_with(char::is_whitespace);
        match (sentence.is_empty(), is_detail) {
            (true, _) => {}
            (false, true) => sentence.push('\n'),
            (false, false) => sentence.push_str(": "),
        }
        sentence.push_str(line);
    }
    sentence
}
