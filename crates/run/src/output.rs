//! What a program prints, and how it ends.

pub(crate) mod observer;

use std::io::{stderr, stdout};
use std::process::ExitCode;
use std::sync::OnceLock;

use candle_comm::launch::cannot_start;
use candle_comm::message_of;
use candle_core::{Error, Result};
use candle_launch::{
    CANNOT_GO_ON_EXIT_CODE, RankEnv, WOULD_FAIL_AGAIN_EXIT_CODE, has_no_reader, hint_of_files,
    without_long_words, write_whole,
};

/// The first error of stdout, after which nothing more is written to it: half a line would be between others.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Prints a line on stdout. Nothing ends here if it cannot be written: [`check_printed`] tells at the end.
pub fn print_line(line: &str) {
    if LOST.get().is_none() {
        let line = format!("{line}\n");
        keep_printed(write_whole(&mut stdout().lock(), line.as_bytes()));
    }
}

/// Keeps for [`check_printed`] what became of something that was written to stdout.
pub fn keep_printed(written: std::io::Result<()>) {
    if let Err(err) = written {
        LOST.get_or_init(|| err);
    }
}

/// An error if a line was lost, such as on a full disk. A reader that has gone away (`| head`) has enough, and is none; nor is a terminal that is
/// gone.
///
/// # Errors
/// See above.
pub fn check_printed() -> Result<()> {
    keep_printed(write_whole(&mut stdout().lock(), &[]));
    match LOST.get() {
        Some(err) if !has_no_reader(err) => {
            Err(Error::msg(format!("cannot write to stdout: {err}")))
        }
        _ => Ok(()),
    }
}

/// Prints an error as a sentence, with its hints below, and turns it into a non-zero exit code.
pub fn exit_with(result: Result<()>) -> ExitCode {
    match result.and_then(|()| check_printed()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            print_error(&err);
            ExitCode::FAILURE
        }
    }
}

/// Prints an error as a sentence, with its hints below.
pub fn print_error(err: &Error) {
    print_message(&in_words(err));
}

/// As [`exit_with`] for a program whose processes may be ranks of one run: what ends all of them is printed once, and of a run without a
/// first step the exit code says that starting them again, on these hosts, would not help.
pub fn exit_as_rank(result: Result<ExitCode>, has_begun: bool) -> ExitCode {
    // What a run has trained is saved all the same.
    let printed = |code| {
        if code == ExitCode::SUCCESS {
            exit_with(Ok(()))
        } else {
            code
        }
    };
    result.map(printed).unwrap_or_else(|err| {
        print_for_all(&in_words(&err));
        match RankEnv::from_env() {
            _ if has_begun => ExitCode::FAILURE,
            Ok(env) => ExitCode::from(code_of_refusal(&env)),
            Err(_) => ExitCode::from(WOULD_FAIL_AGAIN_EXIT_CODE),
        }
    })
}

/// Prints what keeps this rank from starting, or has rank 0 print it.
pub fn print_for_all(message: &str) {
    match RankEnv::from_env() {
        Ok(env) => cannot_start(&env, message, print_message),
        Err(_) => print_message(message),
    }
}

/// Prints what is wrong, a sentence with hints below.
pub fn print_message(message: &str) {
    print_note(&format!("error: {message}"));
}

/// Prints a line on stderr, without the middle of [long words](without_long_words). That it cannot be written ends nothing.
pub fn print_note(line: &str) {
    let line = without_long_words(line);
    let _ = write_whole(&mut stderr().lock(), format!("{line}\n").as_bytes());
}

/// The exit code of a run that was refused before its first step: starting it again would not help. One that was started before may have run
/// then, on other hosts.
pub fn code_of_refusal(env: &RankEnv) -> u8 {
    match env.num_restarts() {
        0 => WOULD_FAIL_AGAIN_EXIT_CODE,
        _ => CANNOT_GO_ON_EXIT_CODE,
    }
}

/// An error as a sentence, with its hints below.
pub fn in_words(err: &Error) -> String {
    sentence(&message_of(err))
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
    if let Some(hint) = hint_of_files(&sentence) {
        sentence = format!("{sentence}\n{hint}");
    }
    without_long_words(&sentence).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_lose_their_middle() {
        let name = "ä".repeat(100_000);
        let said = in_words(&Error::msg(format!(
            "there is no tensor {name:?}\nhint: look for it"
        )));
        assert!(said.len() < 2000, "{}", said.len());
        assert!(said.starts_with("there is no tensor \"ä"));
        assert!(said.contains("..(100002 letters).."));
        assert!(said.contains("\nhint: look for it"));
        let path = "/folder".repeat(100);
        assert_eq!(in_words(&Error::msg(&path)).lines().next(), Some(&*path));
    }
}
