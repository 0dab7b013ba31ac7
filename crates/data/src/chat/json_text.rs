//! JSON as Python reads and writes it: with integers of any size, NaN and infinities, and with the byte-order marks of
//! files that were joined.

use std::sync::LazyLock;

use minijinja::Value;
use minijinja::value::ValueKind;
use regex::{Captures, Regex};
use serde::de::IgnoredAny;
use serde_json::{Deserializer, Result};

use super::python_values::LongInteger;

/// The byte-order mark of UTF-8.
pub(crate) const BOM: char = '\u{feff}';

/// Why bytes are no text.
pub(crate) const NOT_UTF8: &str =
    "it is not UTF-8\nhint: convert the file, e.g. with iconv -f LATIN1 -t UTF-8";

/// Numbers that Python's `json.dumps` writes and JSON has not: how, and what they are.
const NUMBERS: [(&str, f64); 3] = [
    ("NaN", f64::NAN),
    ("Infinity", f64::INFINITY),
    ("-Infinity", f64::NEG_INFINITY),
];

/// Digits with which an integer may have no room in the numbers of `serde_json`, which makes a float of it.
const LONG: usize = 19;

/// Stands before a number while it is a text; no character.
const MARK: char = '\u{fdd2}';

/// Texts, which may spell such numbers out, numbers, and the byte-order marks of joined files.
static TEXT_OR_NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r#"(?s)"(?:[^"\\]|\\.)*"|NaN|-?Infinity|-?[0-9][0-9.eE+-]*|\x{feff}"#).ok()
});

/// The value that a text is.
///
/// # Errors
/// It is none.
pub(crate) fn read_json(text: &str) -> Result<Value> {
    let text = text.strip_prefix(BOM).unwrap_or(text);
    match with_marked_numbers(text) {
        None => serde_json::from_str(text),
        Some(marked) => serde_json::from_str(&marked).map(with_numbers),
    }
}

/// The values of a text, one after the other, which may be those of files that were joined.
///
/// # Errors
/// It is something else.
pub(crate) fn read_json_values(text: &str) -> Result<Vec<Value>> {
    match with_marked_numbers(text) {
        None => Deserializer::from_str(text).into_iter().collect(),
        Some(marked) => {
            let values = Deserializer::from_str(&marked).into_iter();
            values.map(|value| value.map(with_numbers)).collect()
        }
    }
}

/// Whether a text begins with a value that is whole, if it has such numbers or byte-order marks.
pub(crate) fn begins_with_json(text: &str) -> bool {
    let marked = with_marked_numbers(text);
    marked.is_some_and(|marked| {
        let mut values = Deserializer::from_str(&marked).into_iter::<IgnoredAny>();
        values.next().is_some_and(|value| value.is_ok())
    })
}

/// With numbers that JSON or `serde_json` has not as marked texts, and without byte-order marks; `None` if there are none.
fn with_marked_numbers(text: &str) -> Option<String> {
    let runs = text
        .as_bytes()
        .chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit());
    let has_long = runs
        .into_iter()
        .any(|run| run.len() >= LONG && run[0].is_ascii_digit());
    let has_words = ["NaN", "Infinity"].iter().any(|word| text.contains(word));
    if !has_long && !has_words && !text.contains(BOM) {
        return None;
    }
    let is_marked = |number: &str| {
        let digits = number.strip_prefix('-').unwrap_or(number);
        let is_integer =
            digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
        is_integer && digits.len() >= LONG || NUMBERS.iter().any(|(name, _)| *name == number)
    };
    let marked = TEXT_OR_NUMBER
        .as_ref()?
        .replace_all(text, |found: &Captures<'_>| {
            let found = &found[0];
            if found.starts_with(BOM) {
                String::new()
            } else if is_marked(found) {
                format!("\"{MARK}{found}\"")
            } else {
                found.to_string()
            }
        });
    Some(marked.into_owned())
}

/// With the numbers that marked texts stand for.
fn with_numbers(value: Value) -> Value {
    match value.kind() {
        ValueKind::String => {
            let marked = value.as_str().and_then(|text| text.strip_prefix(MARK));
            marked.and_then(number).unwrap_or(value)
        }
        ValueKind::Seq => {
            let items = value.try_iter().into_iter().flatten();
            items.map(with_numbers).collect()
        }
        ValueKind::Map => {
            let names = value.try_iter().into_iter().flatten();
            let fields = names.map(|name| {
                let field = value.get_item(&name).unwrap_or_default();
                (name, with_numbers(field))
            });
            Value::from_pairs(fields)
        }
        _ => value,
    }
}

/// The number that a marked text is; `None` if none was marked.
fn number(text: &str) -> Option<Value> {
    if let Some((_, number)) = NUMBERS.iter().find(|(name, _)| *name == text) {
        return Some(Value::from(*number));
    }
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(match (text.parse::<i128>(), text.parse::<u128>()) {
        (Ok(integer), _) => Value::from(integer),
        (_, Ok(integer)) => Value::from(integer),
        _ => Value::from_object(LongInteger(text.to_string())),
    })
}
