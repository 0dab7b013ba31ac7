//! Where a record is, for messages about it.

use super::data_files::{Data, FileFormat};

/// A file, by its index, and the place of a record in it, from 1: a line, or a record where files have no lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct RecordLocation {
    pub file: u32,
    pub place: u64,
}

impl Data {
    /// The place in words.
    pub(crate) fn describe(&self, location: RecordLocation) -> String {
        let Some(file) = self.files.get(location.file as usize) else {
            return format!("record {}", location.place);
        };
        let (path, place) = (file.path.display(), location.place);
        match file.format {
            FileFormat::Text => path.to_string(),
            FileFormat::JsonLines => format!("{path} line {place}"),
            FileFormat::Json | FileFormat::Parquet => format!("{path} record {place}"),
        }
    }
}
