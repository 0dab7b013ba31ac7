//! Writes a file of tokens, record by record.

use std::io::Write;

use candle_core::{Error, Result, bail};
use twox_hash::XxHash3_128;

use super::record_encoder::EncodedRecord;
use super::token_index::{IndexEntry, Origin};
use super::token_list::{Found, MAGIC, NO_LOSS};
use crate::records::report::DataReport;

/// Writes a file of tokens.
pub(crate) struct TokensWriter<W> {
    writer: W,
    index: Vec<u8>,
    found: Found,
    hash: XxHash3_128,
}

impl<W: Write> TokensWriter<W> {
    pub fn new(writer: W) -> Self {
        Self {
            writer,
            index: Vec::new(),
            found: Found::default(),
            hash: XxHash3_128::new(),
        }
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
        self.index.extend(entry.to_bytes());
        self.hash.write(&bytes);
        self.found.num_tokens += u64::from(len);
        self.writer.write_all(&bytes).map_err(Error::wrap)
    }

    /// The writer, with everything written.
    pub fn finish(mut self, report: DataReport) -> Result<W> {
        let index = XxHash3_128::oneshot(&self.index);
        self.hash.write(&index.to_le_bytes());
        self.found.digest = format!("{:032x}", self.hash.finish_128());
        self.found.report = report;
        let found = serde_json::to_vec(&self.found).map_err(Error::wrap)?;
        let mut hash = XxHash3_128::new();
        hash.write(&self.index);
        hash.write(&found);
        let lens = [self.index.len() as u64, found.len() as u64];
        let writer = &mut self.writer;
        writer.write_all(&self.index)?;
        writer.write_all(&found)?;
        for len in lens {
            writer.write_all(&len.to_le_bytes())?;
        }
        writer.write_all(&hash.finish_128().to_le_bytes())?;
        writer.write_all(MAGIC)?;
        writer.flush()?;
        Ok(self.writer)
    }
}
