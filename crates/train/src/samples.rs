//! Training samples: sample i is `ids[i*T ..= i*T + T]`, T inputs and, shifted by one, T targets.

use std::sync::Arc;

use candle_core::{Result, bail};

/// The samples of a data set; neighbours share one token, the last target of one being the first input of the next.
#[derive(Clone, Debug)]
pub struct Samples {
    ids: Arc<[u32]>,
    seq_len: usize,
    num_samples: usize,
}

impl Samples {
    /// Cuts `ids` into `n = (ids.len() - 1) / seq_len` samples; what is left at the end is not used.
    ///
    /// # Errors
    /// `seq_len` is zero, or there are fewer than `seq_len + 1` ids.
    pub fn new(ids: Arc<[u32]>, seq_len: usize) -> Result<Self> {
        if seq_len == 0 {
            bail!("seq_len is 0, expected at least one token per sequence");
        }
        let num_samples = ids.len().saturating_sub(1) / seq_len;
        if num_samples == 0 {
            bail!(
                "the data is too short: {} tokens, but one sample of seq_len {seq_len} needs {} (its inputs and one more target)\nhint: use more text or a seq_len of at most {}",
                ids.len(),
                seq_len.saturating_add(1),
                ids.len().saturating_sub(1).max(1)
            );
        }
        Ok(Self {
            ids,
            seq_len,
            num_samples,
        })
    }

    /// Sample `index % len()`, the `seq_len + 1` ids of its inputs and targets.
    pub fn get(&self, index: usize) -> &[u32] {
        let start = (index % self.num_samples) * self.seq_len;
        &self.ids[start..=start + self.seq_len]
    }

    /// Number of samples, n >= 1.
    pub fn len(&self) -> usize {
        self.num_samples
    }

    /// Always false: data without a sample is an error in [`Samples::new`].
    pub fn is_empty(&self) -> bool {
        self.num_samples == 0
    }

    /// Tokens per sequence, T.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }
}
