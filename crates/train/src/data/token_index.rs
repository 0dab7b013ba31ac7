//! What is known of each record of a data set without reading its tokens.

use serde::{Deserialize, Serialize};

/// Whether a record may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordKind {
    /// Plain text: one that is longer than a sequence is cut into several.
    Text,
    /// Anything else goes into a sequence as it is.
    Whole,
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    /// Place of its first token.
    pub start: u64,
    pub len: u32,
    /// Index of its first token that has loss; its length if none has.
    pub first_target: u32,
    pub kind: RecordKind,
    /// Index of its [`DataSpec`](super::DataSpec).
    pub source: u32,
    /// Index of its file, and its place there.
    pub file: u32,
    pub place: u64,
}

impl IndexEntry {
    /// Bytes of an entry in a file.
    pub const NUM_BYTES: usize = 40;

    pub fn to_bytes(self) -> [u8; Self::NUM_BYTES] {
        let mut bytes = [0; Self::NUM_BYTES];
        let kind = match self.kind {
            RecordKind::Text => 0,
            RecordKind::Whole => 1,
        };
        let lens = u64::from(self.len) | u64::from(self.first_target) << 32;
        let sources = u64::from(self.source) | u64::from(self.file) << 32;
        let words = [self.start, lens, sources, self.place, kind];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` of what [`Self::to_bytes`] does not write.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let words = bytes
            .chunks_exact(8)
            .map(|word| word.try_into().map(u64::from_le_bytes));
        let words: Vec<u64> = words.collect::<Result<_, _>>().ok()?;
        let &[start, lens, sources, place, kind] = words.as_slice() else {
            return None;
        };
        Some(Self {
            start,
            len: lens as u32,
            first_target: (lens >> 32) as u32,
            kind: match kind {
                0 => RecordKind::Text,
                1 => RecordKind::Whole,
                _ => return None,
            },
            source: sources as u32,
            file: (sources >> 32) as u32,
            place,
        })
    }
}
