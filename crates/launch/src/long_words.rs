//! Words of any length, which strangers choose: names of files, tensors and fields.

use std::borrow::Cow;

/// A word has so many letters before its middle is left out: names of tensors, files and fields are a stranger's and may have any length.
const LONG_WORD: usize = 1000;

/// A text in which words of more than a thousand letters have their beginning and end only.
pub fn without_long_words(text: &str) -> Cow<'_, str> {
    if text.len() <= LONG_WORD {
        return text.into();
    }
    let words = text.split_inclusive(char::is_whitespace);
    let words = words.map(|word| {
        let num_letters = word.trim_end().chars().count();
        if num_letters <= LONG_WORD {
            return word.to_string();
        }
        let head: String = word.chars().take(LONG_WORD / 3).collect();
        // With the white space behind it.
        let tail: String = word.chars().skip(num_letters - LONG_WORD / 3).collect();
        format!("{head}..({num_letters} letters)..{tail}")
    });
    words.collect()
}
