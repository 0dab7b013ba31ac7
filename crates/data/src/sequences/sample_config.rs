//! How records become samples.

use std::fmt;
use std::str::FromStr;

use serde::de::IntoDeserializer;
use serde::de::value::Error;
use serde::{Deserialize, Serialize};

/// How the records of a data set become samples, which are sequences of at most `seq_len` tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleConfig {
    /// Longest sequence, in tokens.
    pub seq_len: usize,
    /// Put several short records into a sequence; otherwise each has its own.
    pub packing: bool,
    /// Keep the records of a sequence apart: a token sees those of its own record only, and positions restart. Otherwise a token sees
    /// all that come before it.
    pub document_mask: bool,
    /// What becomes of records that are longer than a sequence and are no plain text.
    pub overlong: Overlong,
    /// How often each part of the data is in an epoch, by the index of its [`DataSpec`](crate::DataSpec); 1 beyond the list.
    pub weights: Vec<f64>,
    /// Chooses the samples of parts that are not in an epoch as a whole.
    pub seed: u64,
}

impl SampleConfig {
    /// Packed sequences of at most `seq_len` tokens, each sample once in an epoch.
    pub fn new(seq_len: usize) -> Self {
        Self {
            seq_len,
            packing: true,
            document_mask: true,
            overlong: Overlong::default(),
            weights: Vec::new(),
            seed: 0,
        }
    }
}

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
        self.serialize(f)
    }
}

impl FromStr for Overlong {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::deserialize(name.into_deserializer())
            .map_err(|_: Error| format!("{name:?} is not one of truncate, drop and error"))
    }
}
