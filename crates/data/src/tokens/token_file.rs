//! The file of a data set's tokens, in safetensors: `ids`, u32 with the highest bit where a token has no loss; `records`, six u64 of each;
//! and `report`, what was found, as JSON. The digest in the report is that of the other two, and the header has the report's.

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom, Write};

use candle_core::{Error, Result, bail};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use super::record_encoder::EncodedRecord;
use super::token_index::{IndexEntry, Origin};
use crate::records::DataReport;

/// The bit of a token without loss.
pub(super) const NO_LOSS: u32 = 1 << 31;
/// Bytes before the first id: the header, which is written last, and its length.
pub(super) const HEADER: usize = 512;
/// What the header has beside the sizes.
const CHECKSUM: &str = "checksum";

/// What is known of all tokens together.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Found {
    pub num_tokens: u64,
    pub max_id: u32,
    pub digest: String,
    pub report: DataReport,
}

/// Writes a file of tokens, record by record.
pub(super) struct TokensWriter<W> {
    writer: W,
    records: Vec<u8>,
    found: Found,
    hash: XxHash3_128,
}

impl<W: Write + Seek> TokensWriter<W> {
    pub fn new(mut writer: W) -> Result<Self> {
        writer.write_all(&[0; HEADER])?;
        Ok(Self {
            writer,
            records: Vec::new(),
            found: Found::default(),
            hash: XxHash3_128::new(),
        })
    }

    /// Appends a record.
    pub fn push(&mut self, record: &EncodedRecord, origin: Origin) -> Result<()> {
        let EncodedRecord { ids, has_loss, .. } = record;
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for (&id, &has_loss) in ids.iter().zip(has_loss) {
            if id >= NO_LOSS {
                bail!("token id {id} is beyond 2^31");
            }
            self.found.max_id = self.found.max_id.max(id);
            let word = if has_loss { id } else { id | NO_LOSS };
            bytes.extend(word.to_le_bytes());
        }
        let Ok(len) = u32::try_from(ids.len()) else {
            bail!("a record has {} tokens, expected at most 2^32", ids.len());
        };
        let first_target = has_loss.iter().position(|&has_loss| has_loss);
        let entry = IndexEntry {
            start: self.found.num_tokens,
            len,
            first_target: first_target.map_or(len, |first| first as u32),
            checksum: XxHash3_128::oneshot(&bytes) as u64,
            origin,
        };
        let words = entry.to_words().map(u64::to_le_bytes);
        self.records.extend(words.as_flattened());
        self.hash.write(&bytes);
        self.found.num_tokens += u64::from(len);
        self.writer.write_all(&bytes).map_err(Error::wrap)
    }

    /// The writer, with everything written.
    pub fn finish(mut self, report: DataReport) -> Result<W> {
        self.found.digest = digest(self.hash, &self.records);
        self.found.report = report;
        let report = serde_json::to_vec(&self.found).map_err(Error::wrap)?;
        let num_records = self.records.len() / IndexEntry::NUM_BYTES;
        let header = header(self.found.num_tokens as usize, num_records, &report)?;
        self.writer.write_all(&self.records)?;
        self.writer.write_all(&report)?;
        self.writer.rewind()?;
        self.writer.write_all(&header)?;
        self.writer.flush()?;
        Ok(self.writer)
    }
}

/// The header of a file of so many tokens and records and with this report.
fn header(num_tokens: usize, num_records: usize, report: &[u8]) -> Result<[u8; HEADER]> {
    let mut end = 0;
    let mut tensor = |name: &str, dtype: Dtype, shape: Vec<usize>| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let data_offsets = (start, end);
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets,
        };
        (name.to_string(), info)
    };
    let tensors = vec![
        tensor("ids", Dtype::U32, vec![num_tokens]),
        tensor(
            "records",
            Dtype::U64,
            vec![num_records, IndexEntry::NUM_WORDS],
        ),
        tensor("report", Dtype::U8, vec![report.len()]),
    ];
    let checksum = format!("{:032x}", XxHash3_128::oneshot(report));
    let about = HashMap::from([(CHECKSUM.to_string(), checksum)]);
    let tensors = Metadata::new(Some(about), tensors).map_err(Error::wrap)?;
    let mut header = [b' '; HEADER];
    header[..8].copy_from_slice(&(HEADER as u64 - 8).to_le_bytes());
    serde_json::to_writer(&mut header[8..], &tensors).map_err(Error::wrap)?;
    Ok(header)
}

/// The checksum of all ids, which are in `hash`, and of how they are cut into records.
fn digest(mut hash: XxHash3_128, records: &[u8]) -> String {
    hash.write(&XxHash3_128::oneshot(records).to_le_bytes());
    format!("{:032x}", hash.finish_128())
}

/// What [`TokensWriter`] has written, but the ids. All of it is read and its checksums are compared.
///
/// # Errors
/// Anything else.
pub(super) fn read_tokens(source: &mut (impl Read + Seek)) -> Result<(Vec<IndexEntry>, Found)> {
    let damaged = || Error::msg("it is no whole file of tokens");
    let num_bytes = source.seek(SeekFrom::End(0))?;
    let mut told = [0; HEADER];
    source.rewind()?;
    source.read_exact(&mut told)?;
    let sizes: Metadata = serde_json::from_slice(&told[8..]).map_err(Error::wrap)?;
    if num_bytes != (HEADER + sizes.data_len()) as u64 {
        return Err(damaged());
    }
    // As the offsets say, none of which lies beyond the end of the file. The shapes are compared with what is read.
    let len_of = |name: &str| {
        let (start, end) = sizes.info(name)?.data_offsets;
        Some(end - start)
    };
    let (Some(ids_len), Some(records_len), Some(report_len)) =
        (len_of("ids"), len_of("records"), len_of("report"))
    else {
        return Err(damaged());
    };
    let mut hash = XxHash3_128::new();
    let mut block = vec![0; 1 << 20];
    let mut max_id = 0;
    let mut left = ids_len;
    while left > 0 {
        let len = left.min(block.len());
        source.read_exact(&mut block[..len])?;
        hash.write(&block[..len]);
        let words = block[..len].as_chunks().0.iter();
        let ids = words.map(|word| u32::from_le_bytes(*word) & !NO_LOSS);
        max_id = ids.fold(max_id, u32::max);
        left -= len;
    }
    let mut records = vec![0; records_len];
    source.read_exact(&mut records)?;
    let mut report = vec![0; report_len];
    source.read_exact(&mut report)?;
    let (num_tokens, num_records) = (ids_len / 4, records_len / IndexEntry::NUM_BYTES);
    if told != header(num_tokens, num_records, &report)? {
        return Err(damaged());
    }
    let found: Found = serde_json::from_slice(&report).map_err(Error::wrap)?;
    if digest(hash, &records) != found.digest
        || (found.num_tokens, found.max_id) != (num_tokens as u64, max_id)
    {
        return Err(damaged());
    }
    let words = records
        .as_chunks()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word));
    let words: Vec<u64> = words.collect();
    let entries = words.as_chunks().0.iter();
    let entries: Option<Vec<IndexEntry>> = entries.map(|it| IndexEntry::from_words(*it)).collect();
    let entries = entries.ok_or_else(damaged)?;
    let mut end = 0;
    for entry in &entries {
        if entry.start != end || entry.first_target > entry.len {
            return Err(damaged());
        }
        end += u64::from(entry.len);
    }
    if end != found.num_tokens {
        return Err(damaged());
    }
    Ok((entries, found))
}
