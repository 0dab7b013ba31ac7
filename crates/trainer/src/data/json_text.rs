//! JSON as data files have it: with the numbers that Python writes and JSON has not, and the byte-order marks of files
//! that were joined.

use std::sync::LazyLock;

use minijinja::Value;
use minijinja::value::ValueKind;
use regex::{Captures, Regex};
use serde_json::{Deserializer, Result};

use super::data_file::BOM;

/// Why bytes are no text.
pub(super) const NOT_UTF8: &str =
    "it is not UTF-8\nhint: convert the file, e.g. with iconv -f LATIN1 -t UTF-8";

/// Numbers that Python's `json.dumps` writes: how, and what they are.
const NUMBERS: [(&str, f64); 3] = [
    ("NaN", f64::NAN),
    ("Infinity", f64::INFINITY),
    ("-Infinity", f64::NEG_INFINITY),
];

/// What stands before such a number while it is a text; no character.
const MARK: char = '\u{fdd2}';

/// Texts, which may spell these numbers out, and the numbers.
static TEXT_OR_NUMBER: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"(?s)"(?:[^"\\]|\\.)*"|NaN|-?Infinity"#).ok());

/// The value that a text is.
///
/// # Errors
/// It is none.
pub(super) fn json_value(text: &str) -> Result<Value> {
    let text = text.strip_prefix(BOM).unwrap_or(text);
    let value = serde_json::from_str(text);
    value.or_else(|err| match with_marked_numbers(text) {
        Some(marked) => serde_json::from_str(&marked).map(with_numbers),
        None => Err(err),
    })
}

/// The values of a text, one after the other, which may be those of files that were joined.
///
/// # Errors
/// It is something else.
pub(super) fn json_values(text: &str) -> Result<Vec<Value>> {
    let read = |text: &str| Deserializer::from_str(text).into_iter().collect();
    let values: Result<Vec<Value>> = read(text);
    values.or_else(|err| {
        // In a text of JSON there is no line break.
        let joined = text.replace(&format!("\n{BOM}"), "\n");
        let marked = with_marked_numbers(&joined);
        if marked.is_none() && joined.len() == text.len() {
            return Err(err);
        }
        let values: Vec<Value> = read(&marked.unwrap_or(joined))?;
        Ok(values.into_iter().map(with_numbers).collect())
    })
}

/// With [`NUMBERS`] as marked texts; `None` if there are none.
fn with_marked_numbers(text: &str) -> Option<String> {
    if !text.contains("NaN") && !text.contains("Infinity") {
        return None;
    }
    let marked = TEXT_OR_NUMBER
        .as_ref()?
        .replace_all(text, |found: &Captures<'_>| match &found[0] {
            text if text.starts_with('"') => text.to_string(),
            number => format!("\"{MARK}{number}\""),
        });
    Some(marked.into_owned())
}

/// With the numbers that marked texts stand for.
fn with_numbers(value: Value) -> Value {
    match value.kind() {
        ValueKind::String => {
            let marked = value.as_str().and_then(|text| text.strip_prefix(MARK));
            let number = NUMBERS.iter().find(|(name, _)| Some(*name) == marked);
            number.map_or(value.clone(), |(_, number)| Value::from(*number))
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
