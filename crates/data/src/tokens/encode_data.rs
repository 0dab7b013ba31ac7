//! From files to token ids: read in order, encoded on all cores, written as they come.

use std::io::{Cursor, Seek, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Result, bail};
use rayon::prelude::*;

use super::record_encoder::{EncodedRecord, RecordEncoder};
use super::token_cache::TokenCache;
use super::token_file::TokensWriter;
use super::token_index::Origin;
use super::token_list::Tokens;
use crate::activity::Activity;
use crate::record_error::RecordError;
use crate::records::Data;
use crate::records::columns::MappedColumns;
use crate::records::file_records::{FileRecords, RawRecord};
use crate::records::record::ParsedRecord;
use crate::records::report::{DataReport, RecordNotes};

/// Records and bytes of them that are in memory at a time.
const CHUNK: usize = 4096;
const CHUNK_BYTES: usize = 8 << 20;

impl Tokens {
    /// The tokens that `encoder` makes of `data`.
    ///
    /// They are kept in `cache`. What the files, the tokenizer and the template hold decides what is taken from there. Of several processes
    /// one makes them and the others wait for it. Without a cache, or where there is no room, the tokens are kept in memory.
    ///
    /// # Errors
    /// A file that cannot be read or changes meanwhile; a record with parts that are not supported; a column that no record has; no record from which anything can be
    /// learned.
    pub fn encode(
        data: &Data,
        encoder: &RecordEncoder<'_>,
        cache: Option<&TokenCache>,
    ) -> Result<Self> {
        let tokens = Self::cached(data, encoder, cache)?;
        let report = tokens.report();
        if tokens
            .index()
            .iter()
            .all(|entry| entry.first_target == entry.len)
        {
            bail!("{}", report.nothing_learned(data));
        }
        Ok(tokens)
    }

    fn cached(
        data: &Data,
        encoder: &RecordEncoder<'_>,
        cache: Option<&TokenCache>,
    ) -> Result<Self> {
        let before = data.stamps()?;
        let unchanged = || match data.stamps()? == before {
            true => Ok(()),
            false => bail!(
                "the data was changed while it was read\nhint: run again when the files are complete"
            ),
        };
        if let Some(cache) = cache {
            let key = TokenCache::key(data, encoder)?;
            if let Some(tokens) = cache.open(&key) {
                return Ok(tokens);
            }
            let _lock = cache.lock(&key);
            if let Some(tokens) = cache.open(&key) {
                return Ok(tokens);
            }
            let created = cache.create(&key, |file| {
                encode_into(file, data, encoder)?;
                unchanged()
            });
            // What is wrong with the data comes again below; a full disk does not.
            if let Ok(Some(tokens)) = created {
                return Ok(tokens);
            }
        }
        let file = encode_into(Cursor::new(Vec::new()), data, encoder)?;
        unchanged()?;
        Self::open(file)
    }
}

fn encode_into<W: Write + Seek>(writer: W, data: &Data, encoder: &RecordEncoder<'_>) -> Result<W> {
    let mut writer = TokensWriter::new(writer)?;
    let mut report = DataReport::default();
    let mut records = FileRecords::of(data);
    let columns = MappedColumns::of(&data.columns);
    let done = Arc::new(AtomicU64::new(0));
    let (counter, of_long_texts) = (done.clone(), encoder.num_encoded_bytes());
    let num_encoded = move || of_long_texts.load(Ordering::Relaxed);
    let before = num_encoded();
    let activity = Activity::of_bytes_by("tokenizing", data.num_text_bytes()?, {
        let num_encoded = num_encoded.clone();
        move || counter.load(Ordering::Relaxed) + num_encoded() - before
    });
    loop {
        let (mut chunk, mut num_bytes): (Vec<RawRecord>, _) = (Vec::new(), 0);
        while chunk.len() < CHUNK && num_bytes < CHUNK_BYTES {
            let Some(record) = records.next_record()? else {
                break;
            };
            num_bytes += record.num_bytes();
            chunk.push(record);
        }
        if chunk.is_empty() {
            break;
        }
        let counted = num_encoded();
        let encoded: Vec<_> = chunk
            .into_par_iter()
            .map(|raw| (raw.location, encode_one(raw, &columns, encoder)))
            .collect();
        for (location, encoded) in encoded {
            match encoded {
                Ok((record, origin, notes)) => {
                    report.num_without_target += usize::from(!record.has_loss.contains(&true));
                    report.note(notes, location);
                    writer.push(&record, origin)?;
                }
                Err(RecordError::Unsupported(reason)) => {
                    bail!("{}: {reason}", data.describe(location))
                }
                Err(RecordError::Malformed(reason)) => {
                    report.skip(reason, location);
                }
            }
        }
        let rest = (num_bytes as u64).saturating_sub(num_encoded() - counted);
        done.fetch_add(rest, Ordering::Relaxed);
    }
    drop(activity);
    columns.check()?;
    writer.finish(report)
}

fn encode_one(
    raw: RawRecord,
    columns: &MappedColumns<'_>,
    encoder: &RecordEncoder<'_>,
) -> std::result::Result<(EncodedRecord, Origin, RecordNotes), RecordError> {
    let (location, source) = (raw.location, raw.source);
    let ParsedRecord {
        format,
        record,
        unread,
    } = raw.parse(columns)?;
    let mut notes = RecordNotes {
        unread,
        ..RecordNotes::default()
    };
    let record = encoder.encode_noting(&record, &mut notes)?;
    let origin = Origin {
        format,
        source,
        location,
    };
    Ok((record, origin, notes))
}
