//! What was found in a data set.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::data_files::Data;
use super::record_location::RecordLocation;
use crate::counted::counted;
use crate::few::few;

/// A record from which nothing is learned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecord {
    pub(crate) location: RecordLocation,
    /// Why, as a part of a sentence.
    pub reason: String,
}

/// Malformed records that are told one by one.
pub(crate) const NUM_TOLD: usize = 5;

/// What there is to tell of a record that is learned.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordNotes {
    /// Names of fields that nothing reads.
    pub unread: Vec<String>,
    /// Whether arguments of tool calls were JSON in a text, and are what it says now.
    pub has_parsed_arguments: bool,
}

/// How many records have something, and where the first one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Occurrences {
    count: usize,
    first: RecordLocation,
}

/// What was found in a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataReport {
    /// Records that could not be read.
    pub num_malformed: usize,
    /// The first of them.
    pub malformed: Vec<SkippedRecord>,
    /// Records without a token that has loss.
    pub num_without_target: usize,
    /// Fields that neither this program nor the chat template reads, by name.
    pub(crate) unread: BTreeMap<String, Occurrences>,
    /// Records in which arguments of tool calls were JSON in a text, and are what it says now.
    pub(crate) parsed_arguments: Option<Occurrences>,
}

impl Occurrences {
    fn add(noted: &mut Option<Self>, location: RecordLocation) {
        let first = noted.map_or(location, |noted| noted.first);
        let count = noted.map_or(0, |noted| noted.count) + 1;
        *noted = Some(Self { count, first });
    }

    fn in_words(&self, data: &Data) -> String {
        let records = counted(self.count, "record");
        format!("{records}, the first {}", data.describe(self.first))
    }
}

impl DataReport {
    /// Adds what there is to tell of the record at `location`.
    pub(crate) fn note(&mut self, notes: RecordNotes, location: RecordLocation) {
        for name in notes.unread {
            let mut noted = self.unread.remove(&name);
            Occurrences::add(&mut noted, location);
            self.unread.extend(noted.map(|noted| (name, noted)));
        }
        if notes.has_parsed_arguments {
            Occurrences::add(&mut self.parsed_arguments, location);
        }
    }

    /// What is left out or changed, a line each: files, malformed records, records without a target, fields.
    pub fn warnings(&self, data: &Data) -> Vec<String> {
        let mut lines = data.choices().to_vec();
        if !data.skipped().is_empty() {
            let names: Vec<String> = data
                .skipped()
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            lines.push(format!(
                "skipped {} hidden or of other endings than .txt, .jsonl, .json and .parquet: {}",
                counted(names.len(), "file"),
                few(&names)
            ));
        }
        for record in &self.malformed {
            lines.push(format!(
                "skipped {}: {}",
                data.describe(record.location),
                record.reason
            ));
        }
        if self.num_malformed > self.malformed.len() {
            lines.push(format!(
                "skipped {} in all",
                counted(self.num_malformed, "malformed record")
            ));
        }
        if self.num_without_target > 0 {
            lines.push(format!(
                "skipped {} without a token to learn",
                counted(self.num_without_target, "record")
            ));
        }
        if !self.unread.is_empty() {
            let fields = self.unread.iter();
            let fields = fields.map(|(name, noted)| format!("{name} ({})", noted.in_words(data)));
            lines.push(format!(
                "nothing reads these fields of the records: {}",
                few(&fields.collect::<Vec<_>>())
            ));
        }
        if let Some(noted) = &self.parsed_arguments {
            lines.push(format!(
                "the arguments of tool calls that are JSON in a text were read as that JSON: {}; --keep-argument-strings leaves them texts",
                noted.in_words(data)
            ));
        }
        lines
    }
}
