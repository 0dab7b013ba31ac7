//! What becomes of a record that is longer than a sequence.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What becomes of a record that is longer than a sequence. Plain text is cut into several sequences instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlong {
    /// Its end is left out.
    #[default]
    Truncate,
    /// It is left out.
    Drop,
    /// It is an error.
    Error,
}

impl fmt::Display for Overlong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Truncate => "truncate",
            Self::Drop => "drop",
            Self::Error => "error",
        })
    }
}

impl FromStr for Overlong {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "truncate" => Ok(Self::Truncate),
            "drop" => Ok(Self::Drop),
            "error" => Ok(Self::Error),
            _ => Err(format!("{name:?} is not one of truncate, drop and error")),
        }
    }
}
