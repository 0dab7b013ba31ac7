//! The rows of a file of cells with commas or tabs between them, as records.

use std::io::{Chain, Read, Take};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Result, bail};
use csv::{ByteRecord, Reader, ReaderBuilder, Terminator};
use minijinja::Value;

use super::data_file::DataBytes;
use super::file_records::MAX_RECORD_BYTES;
use crate::record_error::RecordError;
use crate::words::counted;

/// A row of its own after the last one; in a cell it is there only if a quote is still open at the end of the file.
const END: &[u8] = "\n\u{FDD2}end\u{FDD3}\n".as_bytes();

/// The rows of a file, read one by one.
pub(crate) struct CsvRows {
    path: PathBuf,
    reader: Reader<Chain<Take<DataBytes>, &'static [u8]>>,
    columns: Arc<[String]>,
    /// Where the last row began, from 1.
    pub line: u64,
}

/// The cells of a row.
pub(crate) struct CsvRow {
    columns: Arc<[String]>,
    cells: ByteRecord,
}

impl CsvRows {
    /// The rows of `file`, which is at `path`; the first one has the names of the columns. `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read; a quote that is never closed, a name that is no text, two columns of one name.
    pub fn open(path: &Path, file: DataBytes, delimiter: u8) -> Result<Option<Self>> {
        // `\r\n` as the end of a line would make the reader count lines wrongly.
        let reader = ReaderBuilder::new()
            .delimiter(delimiter)
            .terminator(Terminator::Any(b'\n'))
            .has_headers(false)
            .flexible(true)
            .from_reader(file.take(0).chain(END));
        let mut rows = Self {
            path: path.to_path_buf(),
            reader,
            columns: Arc::new([]),
            line: 0,
        };
        let Some(names) = rows.next_cells()? else {
            return Ok(None);
        };
        rows.columns = rows.column_names(&names)?;
        Ok(Some(rows))
    }

    /// The next row, or `None` after the last.
    ///
    /// # Errors
    /// The file cannot be read; a quote that is never closed, or only after so much that no record has it.
    pub fn next_row(&mut self) -> Result<Option<CsvRow>> {
        let cells = self.next_cells()?;
        Ok(cells.map(|cells| CsvRow {
            columns: self.columns.clone(),
            cells,
        }))
    }

    /// The next cells, without the `\r` of a line that ends with `\r\n`.
    fn next_cells(&mut self) -> Result<Option<ByteRecord>> {
        let mut cells = ByteRecord::new();
        loop {
            self.bytes_of_row().set_limit(MAX_RECORD_BYTES as u64 + 1);
            let line = self.reader.position().line();
            if let Err(err) = self.reader.read_byte_record(&mut cells) {
                bail!("cannot read data file {:?}: {err}", self.path);
            }
            if self.bytes_of_row().limit() == 0 {
                bail!(
                    "{} line {line}: the row has more than 64 MB, which is the most that is read of a record\nhint: is a quote never closed? In a quoted \
                     cell a quote is written twice",
                    self.path.display()
                );
            }
            let next_line = self.reader.position().line();
            let is_line_feed = |byte: &&u8| **byte == b'\n';
            let inner = cells.as_slice().iter().filter(is_line_feed).count() as u64;
            let Some(last) = cells.iter().next_back() else {
                return Ok(None);
            };
            if cells.len() == 1 && last == END.trim_ascii() {
                return Ok(None);
            }
            if last.ends_with(END) {
                bail!(
                    "data file {:?}: a quote is opened in the row of line {} and never closed\nhint: in a quoted cell a quote is written twice",
                    self.path,
                    next_line - inner
                );
            }
            self.line = next_line - inner - 1;
            if let Some(kept) = last.strip_suffix(b"\r") {
                let mut trimmed: ByteRecord = cells.iter().take(cells.len() - 1).collect();
                trimmed.push_field(kept);
                cells = trimmed;
            }
            // A line with nothing in it.
            if cells.len() > 1 || !cells.as_slice().is_empty() {
                return Ok(Some(cells));
            }
        }
    }

    /// What is left of the bytes that a row may have.
    fn bytes_of_row(&mut self) -> &mut Take<DataBytes> {
        self.reader.get_mut().get_mut().0
    }

    fn column_names(&self, cells: &ByteRecord) -> Result<Arc<[String]>> {
        let mut names: Vec<String> = Vec::with_capacity(cells.len());
        for (cell, number) in cells.iter().zip(1..) {
            let name = match std::str::from_utf8(cell) {
                // Programs that number rows leave the name out.
                Ok("") => format!("column {number}"),
                Ok(name) => name.to_string(),
                Err(err) => bail!(
                    "data file {:?}: the name of column {number} is not UTF-8: {err}\nhint: convert the file, e.g. with iconv -t UTF-8",
                    self.path
                ),
            };
            if names.contains(&name) {
                bail!(
                    "data file {:?} has two columns {name:?} in its first row, which has the names of the columns",
                    self.path
                );
            }
            names.push(name);
        }
        Ok(names.into())
    }
}

impl CsvRow {
    /// Bytes of its cells.
    pub fn num_bytes(&self) -> usize {
        self.cells.as_slice().len()
    }

    /// An object of texts; an empty cell is null, as good as a field that is missing.
    ///
    /// # Errors
    /// More or fewer cells than columns; a cell that is no text.
    pub fn to_object(&self) -> std::result::Result<Value, RecordError> {
        let (num_cells, num_columns) = (self.cells.len(), self.columns.len());
        if num_cells != num_columns {
            let has = counted(num_cells, "cell");
            let reason = format!(
                "it has {has}, expected {num_columns}, one for each column of the first row"
            );
            return Err(reason.into());
        }
        let mut fields = Vec::with_capacity(num_cells);
        for (name, cell) in self.columns.iter().zip(&self.cells) {
            match std::str::from_utf8(cell) {
                Ok("") => fields.push((name.as_str(), Value::from(()))),
                Ok(text) => fields.push((name.as_str(), Value::from(text))),
                Err(err) => return Err(format!("its {name} is not UTF-8: {err}").into()),
            }
        }
        Ok(Value::from_pairs(fields))
    }
}
