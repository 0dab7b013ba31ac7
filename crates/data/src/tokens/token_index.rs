//! What is known of each record of a data set without reading its tokens.

use crate::records::record::RecordFormat;
use crate::records::record_location::{Place, RecordLocation};

/// Whether a record may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// A checksum of its tokens and of which have loss.
    pub checksum: u64,
    /// What it is and where it is from.
    pub origin: Origin,
}

/// What a record is, and where it is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub format: RecordFormat,
    /// Index of its [`DataSpec`](crate::DataSpec).
    pub source: u32,
    pub location: RecordLocation,
}

impl IndexEntry {
    /// Whether it may be cut.
    pub fn kind(&self) -> RecordKind {
        match self.origin.format {
            RecordFormat::Text => RecordKind::Text,
            _ => RecordKind::Whole,
        }
    }

    /// Words and bytes of an entry in a file.
    pub const NUM_WORDS: usize = 6;
    pub const NUM_BYTES: usize = 8 * Self::NUM_WORDS;

    pub fn to_words(self) -> [u64; Self::NUM_WORDS] {
        let Origin {
            format,
            source,
            location: RecordLocation { file, place },
        } = self.origin;
        [
            self.start,
            u64::from(self.len) | u64::from(self.first_target) << 32,
            self.checksum,
            u64::from(source) | u64::from(file) << 32,
            place.to_word(),
            format as u64,
        ]
    }

    /// `None` of what [`Self::to_words`] does not give.
    pub fn from_words(words: [u64; Self::NUM_WORDS]) -> Option<Self> {
        let [start, lens, checksum, sources, place, format] = words;
        Some(Self {
            start,
            len: lens as u32,
            first_target: (lens >> 32) as u32,
            checksum,
            origin: Origin {
                format: *RecordFormat::ALL.get(usize::try_from(format).ok()?)?,
                source: sources as u32,
                location: RecordLocation {
                    file: (sources >> 32) as u32,
                    place: Place::from_word(place)?,
                },
            },
        })
    }
}
