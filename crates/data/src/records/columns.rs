//! The flag `--columns`: which columns of the files the fields of records are read from.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, bail};
use minijinja::Value;

use super::record_fields::FIELDS;
use crate::chat::has_content;
use crate::words::few;

/// The columns that fields are read from, `FIELD=COLUMN,..`; a field that is not named is read from the column of its own name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    columns: Vec<Column>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Column {
    field: &'static str,
    name: String,
}

impl Columns {
    fn field_of(&self, name: &str) -> Option<&'static str> {
        let mut columns = self.columns.iter();
        columns
            .find(|column| column.name == name)
            .map(|column| column.field)
    }

    /// Whether a column is named for this field.
    pub(crate) fn has_field(&self, field: &str) -> bool {
        self.columns.iter().any(|column| column.field == field)
    }

    /// Whether a field is read from the column of this name.
    pub(crate) fn has_column(&self, name: &str) -> bool {
        self.field_of(name).is_some()
    }

    fn add(&mut self, field: &str, name: String) -> std::result::Result<(), String> {
        let Some(field) = FIELDS.into_iter().find(|known| *known == field) else {
            return Err(format!(
                "records have no field {field:?}; expected one of {}",
                FIELDS.join(", ")
            ));
        };
        if name.is_empty() {
            return Err(format!("{field}= names no column"));
        }
        if self.has_field(field) {
            return Err(format!("it names {field} twice"));
        }
        if let Some(other) = self.field_of(&name) {
            return Err(format!(
                "it reads both {other} and {field} from the column {name:?}"
            ));
        }
        self.columns.push(Column { field, name });
        Ok(())
    }
}

impl FromStr for Columns {
    type Err = String;

    /// What follows a comma without a `=` belongs to the name before.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut pairs: Vec<(&str, String)> = Vec::new();
        for part in text.split(',') {
            match (part.split_once('='), pairs.last_mut()) {
                (Some((field, name)), _) => pairs.push((field.trim(), name.to_string())),
                (None, Some((_, name))) => *name += &format!(",{part}"),
                (None, None) => {
                    return Err(format!(
                        "{part:?} is no FIELD=COLUMN, such as prompt=question"
                    ));
                }
            }
        }
        let mut columns = Self::default();
        for (field, name) in pairs {
            columns.add(field, name)?;
        }
        Ok(columns)
    }
}

impl fmt::Display for Columns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns.iter();
        let pairs: Vec<String> = columns
            .map(|Column { field, name }| format!("{field}={name}"))
            .collect();
        f.write_str(&pairs.join(","))
    }
}

/// Names of columns that are kept for a message.
const MAX_OTHERS: usize = 1000;

/// [`Columns`], and which of them the records of a data set have.
#[derive(Debug)]
pub(crate) struct MappedColumns<'a> {
    pub columns: &'a Columns,
    /// Names of columns of the records, until all that are looked for are found; of others not all if there are very
    /// many.
    seen: Mutex<BTreeSet<String>>,
}

impl<'a> MappedColumns<'a> {
    pub fn of(columns: &'a Columns) -> Self {
        Self {
            columns,
            seen: Mutex::default(),
        }
    }

    /// An object with its columns under the names of their fields; and the names of fields that say something, and in
    /// whose place a column of another name is read.
    pub fn rename<'v>(&self, object: &'v Value) -> (Cow<'v, Value>, Vec<String>) {
        let mut replaced = Vec::new();
        if self.columns.columns.is_empty() {
            return (Cow::Borrowed(object), replaced);
        }
        let names = object.try_iter().into_iter().flatten();
        let names: Vec<String> = names.map(|name| name.to_string()).collect();
        self.note(&names);
        let mut fields = Vec::with_capacity(names.len());
        for name in names {
            let value = object.get_attr(&name).unwrap_or_default();
            match self.columns.field_of(&name) {
                Some(field) => fields.push((field.to_string(), value)),
                None if !self.columns.has_field(&name) => fields.push((name, value)),
                None if has_content(&value) => replaced.push(name),
                None => {}
            }
        }
        (Cow::Owned(Value::from_pairs(fields)), replaced)
    }

    fn note(&self, names: &[String]) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if self.first_missing(&seen).is_none() {
            return;
        }
        for name in names {
            if seen.len() < MAX_OTHERS || self.columns.has_column(name) {
                seen.insert(name.clone());
            }
        }
    }

    fn first_missing(&self, seen: &BTreeSet<String>) -> Option<&Column> {
        let mut columns = self.columns.columns.iter();
        columns.find(|column| !seen.contains(&column.name))
    }

    /// To be called after the last record.
    ///
    /// # Errors
    /// A column that no record has had.
    pub fn check(&self) -> Result<()> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Column { field, name }) = self.first_missing(&seen) else {
            return Ok(());
        };
        let others: Vec<String> = seen.iter().map(|name| format!("{name:?}")).collect();
        let there = match others.is_empty() {
            true => "no record has any column".to_string(),
            false => format!("the columns that are there are {}", few(&others)),
        };
        bail!("--columns {field}={name}: no record has a column {name:?}; {there}")
    }
}
