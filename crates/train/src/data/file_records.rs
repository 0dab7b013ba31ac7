//! The records of files, one after the other, before anything is made of them.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Take};

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::{open_file, read_file};
use minijinja::Value;
use minijinja::value::ValueKind;

use super::data_files::{Data, DataFile, FileFormat};
use super::record::{ParsedRecord, Record, RecordFormat};
use super::record_location::RecordLocation;
use crate::record_error::RecordError;

/// A record as its file has it.
pub(crate) struct RawRecord {
    pub location: RecordLocation,
    /// Index of the [`DataSpec`](super::DataSpec) that it belongs to.
    pub source: u32,
    content: Content,
}

enum Content {
    Text(String),
    /// Why a file has no text.
    NoText(String),
    Json(Vec<u8>),
    Value(Value),
}

impl RawRecord {
    /// What the record says, or why it says nothing.
    pub fn parse(self) -> std::result::Result<ParsedRecord, RecordError> {
        match self.content {
            Content::Text(text) => Ok(ParsedRecord {
                format: RecordFormat::Text,
                record: Record::Text(text),
                unread: Vec::new(),
            }),
            Content::NoText(reason) => Err(reason.into()),
            Content::Value(value) => ParsedRecord::of(&value),
            Content::Json(line) => match serde_json::from_slice::<Value>(&line) {
                Ok(value) => ParsedRecord::of(&value),
                Err(err) => Err(format!("it is not valid JSON: {err}").into()),
            },
        }
    }

    /// Bytes of its text, about.
    pub fn num_bytes(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.len(),
            Content::Json(line) => line.len(),
            Content::NoText(_) => 0,
            Content::Value(_) => 1024,
        }
    }
}

/// The records of a data set in order.
pub(crate) struct FileRecords<'a> {
    files: std::iter::Enumerate<std::slice::Iter<'a, DataFile>>,
    open: Option<OpenFile<'a>>,
}

struct OpenFile<'a> {
    index: u32,
    file: &'a DataFile,
    place: u64,
    records: Records,
}

enum Records {
    Lines(BufReader<Take<File>>),
    Ready(VecDeque<Content>),
    #[cfg(feature = "parquet")]
    Rows(super::parquet_rows::ParquetRows),
}

impl<'a> FileRecords<'a> {
    pub fn of(data: &'a Data) -> Self {
        Self {
            files: data.files.iter().enumerate(),
            open: None,
        }
    }

    /// The next record, or `None` after the last.
    ///
    /// # Errors
    /// A file that cannot be read, a text file that is no text, a JSON or Parquet file that is none. A line that is no record is
    /// not an error here.
    pub fn next_record(&mut self) -> Result<Option<RawRecord>> {
        loop {
            if let Some(open) = &mut self.open {
                if let Some(content) = open.next_content()? {
                    let location = RecordLocation {
                        file: open.index,
                        place: open.place,
                    };
                    let source = open.file.source as u32;
                    return Ok(Some(RawRecord {
                        location,
                        source,
                        content,
                    }));
                }
                self.open = None;
            }
            let Some((index, file)) = self.files.next() else {
                return Ok(None);
            };
            self.open = Some(OpenFile {
                index: index as u32,
                file,
                place: 0,
                records: open(file)?,
            });
        }
    }
}

impl OpenFile<'_> {
    fn next_content(&mut self) -> Result<Option<Content>> {
        match &mut self.records {
            Records::Ready(records) => {
                self.place += 1;
                Ok(records.pop_front())
            }
            Records::Lines(lines) => loop {
                let mut line = Vec::new();
                if let Err(err) = lines.read_until(b'\n', &mut line) {
                    bail!("cannot read data file {:?}: {err}", self.file.path);
                }
                if line.is_empty() {
                    return Ok(None);
                }
                self.place += 1;
                if self.place == 1 && line.starts_with(BOM) {
                    line.drain(..BOM.len());
                }
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(Content::Json(line)));
                }
            },
            #[cfg(feature = "parquet")]
            Records::Rows(rows) => {
                self.place += 1;
                Ok(rows.next_row()?.map(Content::Value))
            }
        }
    }
}

/// The byte-order mark of UTF-8.
const BOM: &[u8] = "\u{feff}".as_bytes();

fn open(file: &DataFile) -> Result<Records> {
    match file.format {
        FileFormat::Text => Ok(Records::Ready([read_text(file)?].into())),
        FileFormat::JsonLines => Ok(Records::Lines(lines(file)?)),
        FileFormat::Json => json(file),
        FileFormat::Parquet => parquet(file),
    }
}

fn lines(file: &DataFile) -> Result<BufReader<Take<File>>> {
    let opened = open_file(&file.path).and_then(|opened| {
        let len = opened.metadata()?.len();
        let mut lines = BufReader::new(opened.take(len));
        let is_utf16 = is_utf16(lines.fill_buf()?);
        Ok((lines, is_utf16))
    });
    match opened {
        Ok((_, true)) => Err(utf16_error(file)),
        Ok((lines, false)) => Ok(lines),
        Err(err) => bail!("cannot read data file {:?}: {err}", file.path),
    }
}

/// Whether a file begins with the byte-order mark of UTF-16, as programs for Windows write it.
fn is_utf16(bytes: &[u8]) -> bool {
    matches!(bytes, [0xff, 0xfe, ..] | [0xfe, 0xff, ..])
}

fn utf16_error(file: &DataFile) -> Error {
    Error::msg(format!(
        "data file {:?} is in UTF-16, expected UTF-8\nhint: convert it, e.g. with iconv -f UTF-16 -t UTF-8",
        file.path
    ))
}

#[cfg(feature = "parquet")]
fn parquet(file: &DataFile) -> Result<Records> {
    Ok(Records::Rows(super::parquet_rows::ParquetRows::open(
        &file.path,
    )?))
}

#[cfg(not(feature = "parquet"))]
fn parquet(file: &DataFile) -> Result<Records> {
    bail!(
        "data file {:?} is in Parquet, which this program was built without\nhint: build it with --features parquet, or convert the file to JSON lines",
        file.path
    )
}

/// An array of records or one; or lines of records, as some files of this ending have.
fn json(file: &DataFile) -> Result<Records> {
    let bytes = read_bytes(file)?;
    let bytes = bytes.strip_prefix(BOM).unwrap_or(&bytes);
    let records: Vec<Value> = match serde_json::from_slice::<Value>(bytes) {
        Ok(value) if value.kind() == ValueKind::Seq => {
            value.try_iter().into_iter().flatten().collect()
        }
        Ok(value) => vec![value],
        Err(err) => {
            let first = bytes
                .split(|&byte| byte == b'\n')
                .find(|line| !line.trim_ascii().is_empty());
            let first = first.and_then(|line| serde_json::from_slice::<Value>(line).ok());
            if first.is_some_and(|value| value.kind() == ValueKind::Map) {
                return Ok(Records::Lines(lines(file)?));
            }
            bail!("data file {:?} is not valid JSON: {err}", file.path)
        }
    };
    Ok(Records::Ready(
        records.into_iter().map(Content::Value).collect(),
    ))
}

fn read_bytes(file: &DataFile) -> Result<Vec<u8>> {
    match read_file(&file.path) {
        Ok(bytes) if is_utf16(&bytes) => Err(utf16_error(file)),
        Ok(bytes) => Ok(bytes),
        Err(err) => bail!("cannot read data file {:?}: {err}", file.path),
    }
}

/// The text of a file. Line endings become `\n`, whether they are `\r\n` or `\r`, as when Python reads a text file: so the token ids
/// are those that a Python script gets. A byte-order mark is left out. Nothing else is changed, nothing is trimmed.
fn read_text(file: &DataFile) -> Result<Content> {
    let bytes = read_bytes(file)?;
    let (path, num_bytes) = (&file.path, bytes.len());
    let mut text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => bail!(
            "data file {path:?} is not UTF-8: invalid byte at offset {} of {num_bytes}\nhint: convert it, e.g. with iconv -t UTF-8",
            e.utf8_error().valid_up_to()
        ),
    };
    if text.as_bytes().starts_with(BOM) {
        text.drain(..BOM.len());
    }
    if text.is_empty() {
        return Ok(Content::NoText("it is empty".to_string()));
    }
    if text.trim().is_empty() {
        return Ok(Content::NoText(format!(
            "it holds nothing but white space ({num_bytes} bytes)"
        )));
    }
    Ok(Content::Text(match text.contains('\r') {
        true => text.replace("\r\n", "\n").replace('\r', "\n"),
        false => text,
    }))
}
