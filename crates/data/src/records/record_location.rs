//! Where a record is, for messages about it.

use serde::{Deserialize, Serialize};

use super::data_files::Data;

/// The place of a record in its file, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// The file is the record.
    Whole,
    /// The line where it begins.
    Line(u64),
    /// So many records are before it, and it: where lines say nothing.
    Record(u64),
}

/// A file, by its index, and the place of a record in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordLocation {
    pub file: u32,
    pub place: Place,
}

impl Place {
    /// As a number, for files.
    pub fn to_word(self) -> u64 {
        match self {
            Self::Whole => 0,
            Self::Line(line) => line << 2 | 1,
            Self::Record(record) => record << 2 | 2,
        }
    }

    /// `None` of what [`Self::to_word`] does not give.
    pub fn from_word(word: u64) -> Option<Self> {
        match (word >> 2, word & 3) {
            (0, 0) => Some(Self::Whole),
            (line, 1) => Some(Self::Line(line)),
            (record, 2) => Some(Self::Record(record)),
            _ => None,
        }
    }
}

impl Data {
    /// The place in words.
    pub(crate) fn describe(&self, location: RecordLocation) -> String {
        let file = self.files.get(location.file as usize);
        let path = file.map_or(String::new(), |file| file.path.display().to_string());
        let place = match location.place {
            Place::Whole => String::new(),
            Place::Line(line) => format!(" line {line}"),
            Place::Record(record) => format!(" record {record}"),
        };
        format!("{path}{place}").trim_start().to_string()
    }
}
