//! Files of JSON that are one document, not a record in each line.

use std::io::{BufRead, Read};

use candle_core::{Result, bail};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::IgnoredAny;
use serde_json::Deserializer;

use super::columns::Columns;
use super::data_file::DataFile;
use super::file_records::MAX_RECORD_BYTES;
use super::preferences::PREFERENCES;
use super::record_fields::FIELDS;
use crate::chat::MASKS_OF_RECORDS;
use crate::chat::json_text::{begins_with_json, read_json, read_json_values};
use crate::file_format::FileFormat;

/// The records of a document; `None` if the file has one in each line.
///
/// A document is an array of records, an object with a list of them ([`list_of`]), or a record over several lines; one may follow another. The
/// first line of a file tells: where that is a record, nothing more is looked at.
///
/// # Errors
/// The file cannot be read; a file of the ending `.json` that is neither.
pub(super) fn document(file: &DataFile, columns: &Columns) -> Result<Option<Vec<Value>>> {
    let mut bytes = file.open()?;
    let is_lines = file.format == FileFormat::JsonLines;
    let line = next_line(file, &mut bytes, is_lines)?;
    let is_cut = is_lines && line.len() > MAX_RECORD_BYTES;
    let value = std::str::from_utf8(&line).map(read_json);
    match value {
        // A line that is damaged or too long is no reason to have all of a file in memory.
        _ if is_cut && !(line.trim_ascii_start().starts_with(b"[") && begins_with_value(file)?) => {
            return Ok(None);
        }
        _ if is_cut => {}
        Ok(Ok(value)) if value.kind() == ValueKind::Map && list_of(&value, columns).is_none() => {
            return Ok(None);
        }
        Ok(Ok(value)) if next_line(file, &mut bytes, is_lines)?.is_empty() => {
            return Ok(Some(records_of(value, columns)));
        }
        Ok(Err(err)) if is_lines && err.is_eof() && begins_with_value(file)? => {}
        _ if is_lines => return Ok(None),
        _ => {}
    }
    let values = values(file)?.into_iter();
    Ok(Some(
        values
            .flat_map(|value| records_of(value, columns))
            .collect(),
    ))
}

/// The next line that is not blank; empty at the end. Of one that is too long to be a record the beginning, where that
/// is all that `is_limited` asks for.
fn next_line(file: &DataFile, bytes: &mut impl BufRead, is_limited: bool) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let most = if is_limited {
        MAX_RECORD_BYTES as u64 + 1
    } else {
        u64::MAX
    };
    loop {
        line.clear();
        match bytes.by_ref().take(most).read_until(b'\n', &mut line) {
            Ok(num_bytes) if num_bytes > 0 && line.trim_ascii().is_empty() => {}
            Ok(_) => return Ok(line),
            Err(err) => return Err(file.unreadable(&err)),
        }
    }
}

/// Whether a file begins with something that is whole, over however many lines.
fn begins_with_value(file: &DataFile) -> Result<bool> {
    let mut values = Deserializer::from_reader(file.open()?).into_iter::<IgnoredAny>();
    match values.next() {
        // A number that only Python writes.
        Some(Err(err)) if err.is_syntax() => {
            let mut start = Vec::new();
            let limited = file.open()?.take(MAX_RECORD_BYTES as u64);
            let read = { limited }.read_to_end(&mut start);
            read.map_err(|err| file.unreadable(&err))?;
            Ok(begins_with_json(&String::from_utf8_lossy(&start)))
        }
        value => Ok(value.is_some_and(|value| value.is_ok())),
    }
}

fn values(file: &DataFile) -> Result<Vec<Value>> {
    match read_json_values(&file.read_text()?) {
        Ok(values) if values.is_empty() => {
            bail!("data file {:?} is not valid JSON: it is empty", file.path)
        }
        Ok(values) => Ok(values),
        Err(err) => bail!("data file {:?} is not valid JSON: {err}", file.path),
    }
}

fn records_of(value: Value, columns: &Columns) -> Vec<Value> {
    let list = match value.kind() {
        ValueKind::Seq => Some(value.clone()),
        _ => list_of(&value, columns),
    };
    match list {
        Some(list) => list.try_iter().into_iter().flatten().collect(),
        None => vec![value],
    }
}

/// What a list of records is called that an object holds beside notes such as a version.
const LISTS: [&str; 8] = [
    "data",
    "train",
    "records",
    "rows",
    "examples",
    "samples",
    "instances",
    "items",
];

/// The records of an object such as `{"version": "1", "data": [{..}, ..]}`: its only list of objects, if it has no field of a record, and the
/// list is its only field or has a name for such lists.
fn list_of(value: &Value, columns: &Columns) -> Option<Value> {
    let is_object = |value: Value| value.kind() == ValueKind::Map;
    if !is_object(value.clone()) {
        return None;
    }
    let is_alone = value.len() == Some(1);
    let mut lists = Vec::new();
    for name in value.try_iter().ok()? {
        let text = name.as_str().unwrap_or_default();
        // A mask says nothing alone, and a list of objects called `train` is none.
        let is_mask = MASKS_OF_RECORDS.contains(&text);
        let mut known = FIELDS.iter().chain(&PREFERENCES);
        let is_field = !is_mask && known.any(|known| *known == text);
        if is_field || columns.has_column(text) {
            return None;
        }
        let field = value.get_item(&name).unwrap_or_default();
        let is_list = field.kind() == ValueKind::Seq && field.is_true();
        if is_list && field.try_iter().ok()?.all(is_object) {
            lists.push((text.to_string(), field));
        }
    }
    let [(name, list)] = lists.try_into().ok()?;
    (is_alone || LISTS.contains(&name.as_str())).then_some(list)
}
