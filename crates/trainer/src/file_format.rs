//! How a file holds records, which its ending tells.

use std::path::Path;

/// The endings, for messages.
pub(crate) const ENDINGS: &str = ".txt, .jsonl, .json, .csv, .tsv or .parquet";

/// How a file holds records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileFormat {
    /// `.txt`: one document.
    Text,
    /// `.jsonl` or `.ndjson`: a record in each line.
    JsonLines,
    /// `.json`: an array of records, or one.
    Json,
    /// `.csv`: a line of names, then a record in each row, with commas between the cells.
    Csv,
    /// `.tsv`: the same with tabs.
    Tsv,
    /// `.parquet`: a record in each row.
    Parquet,
}

impl FileFormat {
    /// That of a file of this name; `None` if it has none of the [`ENDINGS`].
    pub fn of(path: &Path) -> Option<Self> {
        let ending = path.extension()?.to_str()?.to_lowercase();
        match ending.as_str() {
            "txt" => Some(Self::Text),
            "jsonl" | "ndjson" => Some(Self::JsonLines),
            "json" => Some(Self::Json),
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}
