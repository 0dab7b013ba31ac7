//! The lines of launchers and agents on standard error.

use std::io::{Write, stderr};

use crate::without_long_words;

/// Prints a sentence. There is nowhere else to say that it cannot be printed.
pub(super) fn say(sentence: &str) {
    let sentence = without_long_words(sentence);
    let _ = writeln!(stderr(), "candle-train: {sentence}");
}
