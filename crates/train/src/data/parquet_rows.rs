//! The rows of a Parquet file as records.

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};
use minijinja::Value;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use serde::Deserialize;

/// The rows of a file, read group by group.
pub(crate) struct ParquetRows {
    path: PathBuf,
    rows: RowIter<'static>,
}

impl ParquetRows {
    /// # Errors
    /// The file is missing or not in Parquet.
    pub fn open(path: &Path) -> Result<Self> {
        let reader = File::open(path).map_err(Error::wrap);
        let reader = reader.and_then(|file| SerializedFileReader::new(file).map_err(Error::wrap));
        match reader {
            Ok(reader) => Ok(Self {
                path: path.to_path_buf(),
                rows: RowIter::from_file_into(Box::new(reader)),
            }),
            Err(err) => bail!("cannot read data file {path:?}: {err}"),
        }
    }

    /// # Errors
    /// The file is damaged, or compressed in a way that is not built in.
    pub fn next_row(&mut self) -> Result<Option<Value>> {
        let row = self.rows.next().transpose();
        let value = row.map_err(Error::wrap).and_then(|row| {
            let value = row.map(|row| Value::deserialize(row.to_json_value()));
            value.transpose().map_err(Error::wrap)
        });
        match value {
            Ok(value) => Ok(value),
            Err(err) => bail!("cannot read data file {:?}: {err}", self.path),
        }
    }
}
