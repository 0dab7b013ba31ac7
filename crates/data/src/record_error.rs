//! Why nothing can be learned from a record.

use std::fmt;

/// Why nothing can be learned from a record, as a part of a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordError {
    /// It is damaged, or the chat template refuses it. Such a record is left out, and that is told.
    Malformed(String),
    /// It is whole, and has parts that cannot be learned as it asks. Without them something else would be learned: the run ends.
    Unsupported(String),
}

impl fmt::Display for RecordError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Malformed(reason) | Self::Unsupported(reason)) = self;
        f.write_str(reason)
    }
}

impl std::error::Error for RecordError {}

impl From<String> for RecordError {
    fn from(reason: String) -> Self {
        Self::Malformed(reason)
    }
}

impl RecordError {
    /// The same reason, of the part of the record that `name` names.
    pub(crate) fn of(self, name: impl fmt::Display) -> Self {
        match self {
            Self::Malformed(reason) => Self::Malformed(format!("{name} {reason}")),
            Self::Unsupported(reason) => Self::Unsupported(format!("{name} {reason}")),
        }
    }
}
