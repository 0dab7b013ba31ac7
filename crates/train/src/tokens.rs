//! Token ids of a data set: each document's ids followed by the end-of-sequence id, one after the other.

use std::sync::Arc;

use candle_core::Result;

use crate::{Documents, Samples, Tokenizer};

/// The data set as one sequence of token ids; cloning shares it.
#[derive(Clone, Debug)]
pub struct Tokens {
    ids: Arc<[u32]>,
}

impl Tokens {
    /// Encodes `documents`: `ids(document 0), eos, ids(document 1), eos, ..`, without any other special token.
    ///
    /// # Errors
    /// The tokenizer fails on a document.
    pub fn encode(documents: &Documents, tokenizer: &Tokenizer) -> Result<Self> {
        let mut ids = Vec::new();
        for text in documents.iter() {
            ids.extend(tokenizer.encode(text)?);
            ids.push(tokenizer.eos_id());
        }
        Ok(Self::from_ids(ids))
    }

    /// Ids that exist already.
    pub fn from_ids(ids: Vec<u32>) -> Self {
        Self { ids: ids.into() }
    }

    /// All ids, in order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True without any token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Cuts the sequence into samples of `seq_len` tokens.
    ///
    /// # Errors
    /// See [`Samples::new`].
    pub fn samples(&self, seq_len: usize) -> Result<Samples> {
        Samples::new(self.ids.clone(), seq_len)
    }
}
