//! The rows of a Parquet file as records.

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::open_file;
use minijinja::Value;
use parquet::basic::Compression;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde::Deserialize;

use crate::guarded::guarded;

/// The rows of a file, read group by group.
pub(crate) struct ParquetRows {
    path: PathBuf,
    rows: RowIter<'static>,
}

impl ParquetRows {
    /// # Errors
    /// The file is missing, not in Parquet or compressed in a way that is not built in.
    pub fn open(path: &Path) -> Result<Self> {
        let reader = guarded(|| {
            let file = open_file(path).map_err(Error::wrap)?;
            SerializedFileReader::new(file).map_err(Error::wrap)
        });
        let reader = match reader {
            Ok(reader) => reader,
            Err(err) => bail!("cannot read data file {path:?}: {err}"),
        };
        if let Some(codec) = unknown_codec(&reader) {
            bail!(
                "data file {path:?} is compressed with {codec}; expected snappy, gzip, brotli, lz4 or none\nhint: write it again, in Python: import pyarrow.parquet as pq; pq.write_table(pq.read_table({path:?}), \"snappy.parquet\")"
            );
        }
        Ok(Self {
            path: path.to_path_buf(),
            rows: RowIter::from_file_into(Box::new(reader)),
        })
    }

    /// # Errors
    /// The file is damaged.
    pub fn next_row(&mut self) -> Result<Option<Value>> {
        let row = guarded(|| self.rows.next().transpose().map_err(Error::wrap));
        match row.and_then(|row| row.as_ref().map(value_of_row).transpose()) {
            Ok(row) => Ok(row),
            Err(err) => bail!("cannot read data file {:?}: {err}", self.path),
        }
    }
}

/// A row or struct. Its fields stay in their order, in which templates print them.
fn value_of_row(row: &Row) -> Result<Value> {
    let fields = row.get_column_iter();
    let fields = fields.map(|(name, field)| Ok((name.as_str(), value_of(field)?)));
    Ok(Value::from_pairs(fields.collect::<Result<Vec<_>>>()?))
}

fn value_of(field: &Field) -> Result<Value> {
    match field {
        Field::Group(row) => value_of_row(row),
        Field::ListInternal(list) => list.elements().iter().map(value_of).collect(),
        field => Value::deserialize(field.to_json_value()).map_err(Error::wrap),
    }
}

/// A codec of the file without which it cannot be read: that of zstd is in C.
fn unknown_codec(reader: &SerializedFileReader<File>) -> Option<&'static str> {
    let groups = reader.metadata().row_groups().iter();
    let mut codecs =
        groups.flat_map(|group| group.columns().iter().map(|column| column.compression()));
    codecs.find_map(|codec| match codec {
        Compression::ZSTD(_) => Some("zstd"),
        Compression::LZO => Some("lzo"),
        _ => None,
    })
}
