//! Token ids of a data set, read from a file record by record.
//! Nothing but the index is held in memory, and processes share what they read.

use std::io::{Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Result, bail};

use super::record_encoder::{EncodedRecord, with_losses};
use super::token_file::{Found, HEADER, NO_LOSS, TokensWriter, read_tokens};
use super::token_index::{IndexEntry, Origin, RecordKind};
use crate::records::Data;
use crate::records::record::RecordFormat;
use crate::records::record_location::{Place, RecordLocation};
use crate::records::report::DataReport;

/// What a file of tokens is read from.
trait Source: Read + Seek + Send {}
impl<T: Read + Seek + Send> Source for T {}

/// The token ids of a data set, record by record. Cloning shares them.
#[derive(Clone)]
pub struct Tokens {
    source: Arc<Mutex<Box<dyn Source>>>,
    index: Arc<[IndexEntry]>,
    found: Arc<Found>,
}

impl Tokens {
    /// One document of ids that exist already.
    ///
    /// # Errors
    /// An id beyond 2^31.
    pub fn from_ids(ids: Vec<u32>) -> Result<Self> {
        let has_loss = vec![true; ids.len()];
        Self::from_records(&[with_losses(RecordKind::Text, ids, has_loss)])
    }

    /// Records that are in memory already.
    ///
    /// # Errors
    /// An id beyond 2^31.
    pub fn from_records(records: &[EncodedRecord]) -> Result<Self> {
        let mut writer = TokensWriter::new(Cursor::new(Vec::new()))?;
        for (place, record) in records.iter().enumerate() {
            let location = RecordLocation {
                file: 0,
                place: Place::Record(place as u64 + 1),
            };
            let format = match record.kind {
                RecordKind::Text => RecordFormat::Text,
                RecordKind::Whole => RecordFormat::Completion,
            };
            let origin = Origin {
                format,
                source: 0,
                location,
            };
            writer.push(record, origin)?;
        }
        Self::open(writer.finish(DataReport::default())?)
    }

    /// What [`TokensWriter`] has written. All of it is read and its checksums are compared.
    ///
    /// # Errors
    /// Anything else.
    pub(crate) fn open(mut source: impl Read + Seek + Send + 'static) -> Result<Self> {
        let (index, found) = read_tokens(&mut source)?;
        Ok(Self {
            source: Arc::new(Mutex::new(Box::new(source))),
            index: index.into(),
            found: found.into(),
        })
    }

    /// Record `index` of [`Self::num_records`].
    ///
    /// # Errors
    /// There is no such record; its file cannot be read.
    pub fn record(&self, index: usize) -> Result<EncodedRecord> {
        let Some(entry) = self.index.get(index) else {
            bail!("there is no record {index} of {}", self.index.len());
        };
        let (ids, has_loss) = self.part(index, 0..entry.len as usize)?;
        Ok(EncodedRecord {
            kind: entry.kind(),
            ids,
            has_loss,
        })
    }

    /// Tokens `range` of record `index`, and which have loss.
    pub(crate) fn part(&self, index: usize, range: Range<usize>) -> Result<(Vec<u32>, Vec<bool>)> {
        let start = HEADER as u64 + (self.index[index].start + range.start as u64) * 4;
        let mut bytes = vec![0; range.len() * 4];
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let found = source.seek(SeekFrom::Start(start));
        let found = found.and_then(|_| source.read_exact(&mut bytes));
        drop(source);
        if let Err(err) = found {
            bail!(
                "cannot read record {index} of the cached tokens: {err}\nhint: was their file changed since the run began?"
            );
        }
        let words = bytes.as_chunks().0.iter();
        let words = words.map(|word| u32::from_le_bytes(*word));
        Ok(words
            .map(|word| (word & !NO_LOSS, word & NO_LOSS == 0))
            .unzip())
    }

    /// The first record that cannot be cut and is longer than `seq_len`.
    pub fn first_longer_than(&self, seq_len: usize) -> Option<usize> {
        let is_longer =
            |entry: &IndexEntry| entry.kind() == RecordKind::Whole && entry.len as usize > seq_len;
        self.index.iter().position(is_longer)
    }

    /// Where in `data`, of which these tokens were made, a record is, in words.
    pub fn place_of(&self, record: usize, data: &Data) -> String {
        let entry = self.index.get(record);
        entry.map_or(format!("record {record}"), |entry| {
            data.describe(entry.origin.location)
        })
    }

    /// Whether there are conversations, or records that a chat template may make one of.
    pub fn has_conversations(&self) -> bool {
        let mut formats = self.index.iter().map(|entry| entry.origin.format);
        formats.any(RecordFormat::is_conversation)
    }

    pub(crate) fn index(&self) -> &[IndexEntry] {
        &self.index
    }

    /// Number of records.
    pub fn num_records(&self) -> usize {
        self.index.len()
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.found.num_tokens as usize
    }

    /// True without any token.
    pub fn is_empty(&self) -> bool {
        self.found.num_tokens == 0
    }

    /// The highest id.
    pub fn max_id(&self) -> u32 {
        self.found.max_id
    }

    /// A checksum of all ids, of what has loss and of how they are cut into records.
    pub fn digest(&self) -> &str {
        &self.found.digest
    }

    /// What was found in the files that they were made of.
    pub fn report(&self) -> &DataReport {
        &self.found.report
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens")
            .field("num_records", &self.index.len())
            .field("found", &self.found)
            .finish()
    }
}
