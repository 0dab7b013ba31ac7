//! What was found in a data set.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::data_files::Data;
use super::record::RecordFormat;
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

/// What was found in a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataReport {
    /// Records of each spelling.
    pub formats: BTreeMap<RecordFormat, usize>,
    /// Records that could not be read.
    pub num_malformed: usize,
    /// The first of them.
    pub malformed: Vec<SkippedRecord>,
    /// Records without a token that has loss.
    pub num_without_target: usize,
}

impl DataReport {
    /// What was found, in a line: records by their spelling.
    pub fn summary(&self) -> String {
        let formats = self.formats.iter();
        let formats = formats.map(|(format, count)| match (format, count) {
            (RecordFormat::Text, &count) => counted(count, "text"),
            (format, &count) => format!("{} of {format}", counted(count, "record")),
        });
        formats.collect::<Vec<_>>().join(", ")
    }

    /// Whether there are conversations, or records that a chat template may make one of.
    pub fn has_conversations(&self) -> bool {
        let mut formats = self.formats.keys();
        formats.any(|format| !matches!(format, RecordFormat::Text | RecordFormat::Completion))
    }

    /// What is left out, a line each: files, malformed records, records without a target.
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
        lines
    }
}
