//! The records of files, one after the other, before anything is made of them.

use std::io::{BufRead, Read};

use candle_core::{Result, bail};
use minijinja::Value;
use minijinja::value::ValueKind;

use super::columns::MappedColumns;
use super::csv_rows::{CsvRow, CsvRows};
use super::data_file::{DataBytes, DataFile};
use super::data_files::Data;
use super::json_document::document;
use super::record::{ParsedRecord, Record, RecordFormat};
use super::record_location::{Place, RecordLocation};
use crate::chat::json_text::{NOT_UTF8, read_json};
use crate::file_format::FileFormat;
use crate::record_error::RecordError;

/// The longest record that is read, but for files that are one text: what is made of it takes many times as much
/// memory.
pub(super) const MAX_RECORD_BYTES: usize = 64_000_000;

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
    Row(CsvRow),
    Value(Value),
}

impl RawRecord {
    /// What the record says, or why it says nothing.
    pub fn parse(
        self,
        columns: &MappedColumns<'_>,
    ) -> std::result::Result<ParsedRecord, RecordError> {
        match self.content {
            Content::Text(text) => Ok(ParsedRecord {
                format: RecordFormat::Text,
                record: Record::Text(text),
                unread: Vec::new(),
            }),
            Content::NoText(reason) => Err(reason.into()),
            Content::Value(value) => ParsedRecord::of(&value, columns),
            Content::Row(row) => ParsedRecord::of(&row.to_object()?, columns),
            Content::Json(line) => match std::str::from_utf8(&line).map(read_json) {
                Ok(Ok(value)) => ParsedRecord::of(&value, columns),
                Ok(Err(err)) => Err(format!("it is not valid JSON: {err}").into()),
                Err(_) => Err(NOT_UTF8.to_string().into()),
            },
        }
    }

    /// Bytes of its text, about.
    pub fn num_bytes(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.len(),
            Content::Json(line) => line.len(),
            Content::Row(row) => row.num_bytes(),
            Content::NoText(_) => 0,
            Content::Value(value) => num_bytes_of(value),
        }
    }
}

/// Bytes of a value as JSON, about.
fn num_bytes_of(value: &Value) -> usize {
    let parts = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => value.as_str().unwrap_or_default().len(),
        ValueKind::Seq => parts().map(|item| 1 + num_bytes_of(&item)).sum(),
        ValueKind::Map => parts()
            .map(|name| {
                let field = value.get_item(&name).unwrap_or_default();
                1 + num_bytes_of(&name) + num_bytes_of(&field)
            })
            .sum(),
        _ => size_of::<f64>(),
    }
}

impl Data {
    /// The texts of all records that are text; of others prompt and completion.
    ///
    /// # Errors
    /// A file that cannot be read; a column that no record has.
    pub fn texts(&self) -> Result<Vec<String>> {
        let columns = MappedColumns::of(&self.columns);
        let mut records = FileRecords::of(self);
        let mut texts = Vec::new();
        while let Some(record) = records.next_record()? {
            match record.parse(&columns).map(|parsed| parsed.record) {
                Ok(Record::Text(text)) => texts.push(text),
                Ok(
                    Record::Completion {
                        prompt,
                        completion: answer,
                    }
                    | Record::Instruction {
                        prompt,
                        output: answer,
                        ..
                    },
                ) => texts.push(prompt + &answer),
                // What is left out is told when all is encoded.
                Ok(Record::Chat(_)) | Err(_) => {}
            }
        }
        columns.check()?;
        Ok(texts)
    }
}

/// The records of a data set in order.
pub(crate) struct FileRecords<'a> {
    data: &'a Data,
    files: std::iter::Enumerate<std::slice::Iter<'a, DataFile>>,
    open: Option<OpenFile<'a>>,
}

struct OpenFile<'a> {
    index: u32,
    file: &'a DataFile,
    records: Records,
    /// Lines or records that were read.
    num_read: u64,
}

enum Records {
    Whole(Option<Content>),
    Lines(DataBytes),
    Values(std::vec::IntoIter<Value>),
    Cells(Box<CsvRows>),
    #[cfg(feature = "parquet")]
    Rows(super::parquet_rows::ParquetRows),
}

impl<'a> FileRecords<'a> {
    pub fn of(data: &'a Data) -> Self {
        Self {
            data,
            files: data.files.iter().enumerate(),
            open: None,
        }
    }

    /// The next record, or `None` after the last.
    ///
    /// # Errors
    /// A file that cannot be read or is not what its ending says; a record that is too long. A line that is no record
    /// is not an error here.
    pub fn next_record(&mut self) -> Result<Option<RawRecord>> {
        loop {
            if let Some(open) = &mut self.open {
                if let Some(content) = open.next_content()? {
                    let location = RecordLocation {
                        file: open.index,
                        place: open.place(),
                    };
                    let record = RawRecord {
                        location,
                        source: open.file.source as u32,
                        content,
                    };
                    let is_text = matches!(record.content, Content::Text(_));
                    if !is_text && record.num_bytes() > MAX_RECORD_BYTES {
                        bail!(
                            "{}: the record has more than 64 MB, which is the most that is read of one\nhint: cut it into several; a text of any \
                             length can be a .txt file of its own",
                            self.data.describe(location)
                        );
                    }
                    return Ok(Some(record));
                }
                self.open = None;
            }
            let Some((index, file)) = self.files.next() else {
                return Ok(None);
            };
            self.open = Some(OpenFile {
                index: index as u32,
                file,
                records: open(file, self.data)?,
                num_read: 0,
            });
        }
    }
}

impl OpenFile<'_> {
    fn next_content(&mut self) -> Result<Option<Content>> {
        self.num_read += 1;
        match &mut self.records {
            Records::Whole(content) => Ok(content.take()),
            Records::Values(values) => Ok(values.next().map(Content::Value)),
            Records::Lines(lines) => loop {
                let mut line = Vec::new();
                let mut next = lines.by_ref().take(MAX_RECORD_BYTES as u64 + 1);
                if let Err(err) = next.read_until(b'\n', &mut line) {
                    return Err(self.file.unreadable(&err));
                }
                if line.is_empty() {
                    return Ok(None);
                }
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(Content::Json(line)));
                }
                self.num_read += 1;
            },
            Records::Cells(rows) => Ok(rows.next_row()?.map(Content::Row)),
            #[cfg(feature = "parquet")]
            Records::Rows(rows) => Ok(rows.next_row()?.map(Content::Value)),
        }
    }

    /// That of the content which was read last.
    fn place(&self) -> Place {
        match &self.records {
            Records::Whole(_) => Place::Whole,
            Records::Lines(_) => Place::Line(self.num_read),
            Records::Cells(rows) => Place::Line(rows.line),
            Records::Values(_) => Place::Record(self.num_read),
            #[cfg(feature = "parquet")]
            Records::Rows(_) => Place::Record(self.num_read),
        }
    }
}

fn open(file: &DataFile, data: &Data) -> Result<Records> {
    match file.format {
        FileFormat::Text => Ok(Records::Whole(Some(content_of(file.read_text()?)))),
        FileFormat::JsonLines | FileFormat::Json => match document(file, &data.columns)? {
            Some(values) => Ok(Records::Values(values.into_iter())),
            None => Ok(Records::Lines(file.open()?)),
        },
        FileFormat::Csv => cells(file, b','),
        FileFormat::Tsv => cells(file, b'\t'),
        FileFormat::Parquet => parquet(file),
    }
}

fn cells(file: &DataFile, delimiter: u8) -> Result<Records> {
    match CsvRows::open(&file.path, file.open()?, delimiter)? {
        Some(rows) => Ok(Records::Cells(Box::new(rows))),
        None => Ok(Records::Whole(Some(content_of(String::new())))),
    }
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

/// The content of a file that is one text. Line endings become `\n`, whether they are `\r\n` or `\r`, as when Python reads a text file: so the
/// token ids are those that a Python script gets. Nothing else is changed, nothing is trimmed.
fn content_of(text: String) -> Content {
    let num_bytes = text.len();
    match text.trim().is_empty() {
        true if text.is_empty() => Content::NoText("it is empty".to_string()),
        true => Content::NoText(format!(
            "it holds nothing but white space ({num_bytes} bytes)"
        )),
        false if text.contains('\r') => {
            Content::Text(text.replace("\r\n", "\n").replace('\r', "\n"))
        }
        false => Content::Text(text),
    }
}
