//! What was found in a data set.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::data_files::Data;
use super::record_location::RecordLocation;
use crate::file_format::ENDINGS;
use crate::words::counted;
use crate::words::few;

/// Records from which nothing is learned for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SkippedRecords {
    /// Why, as a part of a sentence.
    pub reason: String,
    pub(crate) records: Occurrences,
}

/// Reasons that are told one by one.
const NUM_REASONS: usize = 5;

/// What there is to tell of a record that is learned.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordNotes {
    /// Names of fields that nothing reads.
    pub unread: Vec<String>,
    /// Whether arguments of tool calls were JSON in a text, and are what it says now.
    pub has_parsed_arguments: bool,
    /// Whether a content in parts went to the chat template as parts.
    pub keeps_parts: bool,
    /// Whether a content in parts was joined to one text.
    pub joins_parts: bool,
}

/// How many records have something, and where the first one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Occurrences {
    count: usize,
    first: RecordLocation,
}

/// What was found in a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DataReport {
    /// Records that could not be read.
    pub num_malformed: usize,
    /// The first reasons, and how many of the records each has.
    pub malformed: Vec<SkippedRecords>,
    /// Records without a token that has loss.
    pub num_without_target: usize,
    /// Fields that neither this program nor the chat template reads, by name.
    pub(crate) unread: BTreeMap<String, Occurrences>,
    /// Records in which arguments of tool calls were JSON in a text, and are what it says now.
    pub(crate) parsed_arguments: Option<Occurrences>,
    /// Records with content in parts that went to the chat template as parts.
    pub(crate) kept_parts: Option<Occurrences>,
    /// Records with content in parts that was joined to one text.
    pub(crate) joined_parts: Option<Occurrences>,
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

impl SkippedRecords {
    fn in_words(&self, data: &Data) -> String {
        let first = data.describe(self.records.first);
        match self.records.count {
            1 => format!("skipped {first}: {}", self.reason),
            count => format!(
                "skipped {}, the first {first}: {}",
                counted(count, "record"),
                self.reason
            ),
        }
    }
}

impl DataReport {
    /// Adds a record from which nothing can be learned.
    pub(crate) fn skip(&mut self, reason: String, location: RecordLocation) {
        self.num_malformed += 1;
        let has_room = self.malformed.len() < NUM_REASONS;
        let mut known = self.malformed.iter_mut();
        if let Some(skipped) = known.find(|skipped| skipped.reason == reason) {
            skipped.records.count += 1;
        } else if has_room {
            let records = Occurrences {
                count: 1,
                first: location,
            };
            self.malformed.push(SkippedRecords { reason, records });
        }
    }

    /// Why nothing can be learned of the data, in one sentence; what to do in lines of their own.
    pub(crate) fn nothing_learned(&self, data: &Data) -> String {
        let mut said = "the data has no record from which anything can be learned".to_string();
        let mut hints: Vec<String> = Vec::new();
        for (index, warning) in self.warnings(data).iter().enumerate() {
            let mut lines = warning.split("\nhint: ");
            said += if index == 0 { ": " } else { "; " };
            said += lines.next().unwrap_or_default();
            hints.extend(lines.map(|hint| format!("\nhint: {hint}")));
        }
        said + &hints.concat()
    }

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
        if notes.keeps_parts {
            Occurrences::add(&mut self.kept_parts, location);
        }
        if notes.joins_parts {
            Occurrences::add(&mut self.joined_parts, location);
        }
    }

    /// What is left out or changed, a line each: files, malformed records, records without a target, fields.
    pub fn warnings(&self, data: &Data) -> Vec<String> {
        let mut lines = data.choices().to_vec();
        if !data.skipped().is_empty() {
            let name = |path: &PathBuf| {
                let is_missing = path
                    .metadata()
                    .is_err_and(|err| err.kind() == ErrorKind::NotFound);
                let is_dangling = path.is_symlink() && is_missing;
                let what = if is_dangling {
                    " (a link to nothing)"
                } else {
                    ""
                };
                format!("{}{what}", path.display())
            };
            let names: Vec<String> = data.skipped().iter().map(name).collect();
            lines.push(format!(
                "skipped {} hidden, missing or of other endings than {ENDINGS}: {}",
                counted(names.len(), "file"),
                few(&names)
            ));
        }
        let mut hints = BTreeSet::new();
        for skipped in &self.malformed {
            let line = skipped.in_words(data);
            lines.push(match line.split_once("\nhint: ") {
                Some((reason, hint)) if !hints.insert(hint.to_string()) => reason.to_string(),
                _ => line,
            });
        }
        let told = self.malformed.iter().map(|skipped| skipped.records.count);
        let num_others = self.num_malformed - told.sum::<usize>();
        if num_others > 0 {
            lines.push(format!(
                "skipped {} for other reasons",
                counted(num_others, "record")
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
        if let Some(noted) = &self.kept_parts {
            lines.push(format!(
                "content in parts went to the chat template as parts, as it shows each of them: {}",
                noted.in_words(data)
            ));
        }
        if let Some(noted) = &self.joined_parts {
            lines.push(format!(
                "content in parts was joined to one text, as the chat template does not show each of them: {}",
                noted.in_words(data)
            ));
        }
        lines
    }
}
