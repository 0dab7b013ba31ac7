//! How a file holds records, which its ending tells.

use std::path::Path;

/// The endings, for messages.
pub(crate) const ENDINGS: &str = ".txt, .jsonl, .json, .csv, .tsv or .parquet";

/// What the name of a file in gzip ends with, behind one of the [`ENDINGS`].
pub(crate) const GZIP_ENDING: &str = ".gz";

/// Whether a file has [`GZIP_ENDING`].
fn is_gzip(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str());
    ending.is_some_and(|ending| ending.eq_ignore_ascii_case(&GZIP_ENDING[1..]))
}

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
    /// That of a file of this name; `None` if it has none of the [`ENDINGS`]. All but Parquet may have [`GZIP_ENDING`]
    /// behind.
    pub fn of(path: &Path) -> Option<Self> {
        let path = Path::new(path.file_name()?);
        if is_gzip(path) {
            Self::of_ending(Path::new(path.file_stem()?)).filter(|it| *it != Self::Parquet)
        } else {
            Self::of_ending(path)
        }
    }

    fn of_ending(path: &Path) -> Option<Self> {
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
