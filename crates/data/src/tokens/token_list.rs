//! Token ids of a data set, read from a file record by record.
//!
//! The file has the ids as u32, with the highest bit where a token has no loss, then the index of the records, then what was found,
//! as JSON, then lengths and checksums of these. Nothing but the index is held in memory, and processes share what they read.

use std::io::{Cursor, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Error, Result, bail};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use super::record_encoder::EncodedRecord;
use super::token_index::{IndexEntry, Origin, RecordKind};
use super::tokens_writer::TokensWriter;
use crate::records::Data;
use crate::records::record::RecordFormat;
use crate::records::record_location::{Place, RecordLocation};
use crate::records::report::DataReport;

/// The bit of a token without loss.
pub(super) const NO_LOSS: u32 = 1 << 31;
/// The last bytes of a file.
pub(super) const MAGIC: &[u8; 8] = b"tokens-1";
/// Lengths of index and report, checksum, magic.
const FOOTER: usize = 8 + 8 + 16 + 8;

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

/// What is known of all tokens together.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Found {
    pub num_tokens: u64,
    pub max_id: u32,
    pub digest: String,
    pub report: DataReport,
}

impl Tokens {
    /// One document of ids that exist already.
    ///
    /// # Errors
    /// An id beyond 2^31.
    pub fn from_ids(ids: Vec<u32>) -> Result<Self> {
        let mut has_loss = vec![true; ids.len()];
        if let Some(first) = has_loss.first_mut() {
            *first = false;
        }
        Self::from_records(&[EncodedRecord {
            kind: RecordKind::Text,
            ids,
            has_loss,
        }])
    }

    /// Records that are in memory already.
    ///
    /// # Errors
    /// An id beyond 2^31.
    pub fn from_records(records: &[EncodedRecord]) -> Result<Self> {
        let mut writer = TokensWriter::new(Cursor::new(Vec::new()));
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
        let damaged = || Error::msg("it is no whole file of tokens");
        let len = source.seek(SeekFrom::End(0))?;
        let footer_start = len.checked_sub(FOOTER as u64).ok_or_else(damaged)?;
        let mut footer = [0; FOOTER];
        source.seek(SeekFrom::Start(footer_start))?;
        source.read_exact(&mut footer)?;
        let number = |at: usize| footer[at..at + 8].try_into().map(u64::from_le_bytes);
        let (Ok(index_len), Ok(found_len)) = (number(0), number(8)) else {
            return Err(damaged());
        };
        let meta_len = index_len
            .checked_add(found_len)
            .filter(|meta_len| *meta_len <= footer_start);
        let meta_len = meta_len.ok_or_else(damaged)?;
        let mut meta = vec![0; meta_len as usize];
        source.seek(SeekFrom::Start(footer_start - meta_len))?;
        source.read_exact(&mut meta)?;
        let sum = XxHash3_128::oneshot(&meta).to_le_bytes();
        if &footer[32..] != MAGIC || footer[16..32] != sum {
            return Err(damaged());
        }
        let (index, found) = meta.split_at(index_len as usize);
        let found: Found = serde_json::from_slice(found).map_err(Error::wrap)?;
        if found.num_tokens.checked_mul(4) != Some(footer_start - meta_len) {
            return Err(damaged());
        }
        if digest_of(&mut source, found.num_tokens, index)? != found.digest {
            return Err(damaged());
        }
        let index = index
            .chunks(IndexEntry::NUM_BYTES)
            .map(IndexEntry::from_bytes);
        let index: Option<Vec<IndexEntry>> = index.collect();
        Ok(Self {
            source: Arc::new(Mutex::new(Box::new(source))),
            index: index.ok_or_else(damaged)?.into(),
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
        let start = self.index[index].start + range.start as u64;
        let mut bytes = vec![0; range.len() * 4];
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let found = source.seek(SeekFrom::Start(start * 4));
        let found = found.and_then(|_| source.read_exact(&mut bytes));
        drop(source);
        if let Err(err) = found {
            bail!(
                "cannot read record {index} of the cached tokens: {err}\nhint: was their file changed since the run began?"
            );
        }
        let words = bytes
            .chunks_exact(4)
            .filter_map(|word| word.try_into().ok());
        let words = words.map(u32::from_le_bytes);
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

/// The checksum of the first `num_tokens` tokens and of how they are cut into records.
fn digest_of(source: &mut (impl Read + Seek), num_tokens: u64, index: &[u8]) -> Result<String> {
    let mut hash = XxHash3_128::new();
    let mut block = vec![0; 1 << 20];
    let mut left = num_tokens * 4;
    source.seek(SeekFrom::Start(0))?;
    while left > 0 {
        let len = left.min(block.len() as u64) as usize;
        source.read_exact(&mut block[..len])?;
        hash.write(&block[..len]);
        left -= len as u64;
    }
    hash.write(&XxHash3_128::oneshot(index).to_le_bytes());
    Ok(format!("{:032x}", hash.finish_128()))
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens")
            .field("num_records", &self.index.len())
            .field("found", &self.found)
            .finish()
    }
}
