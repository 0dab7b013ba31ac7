//! Several documents in one sequence: where each begins.

use candle_core::{Result, bail};
use std::sync::Arc;
#[cfg(any(feature = "cudnn", all(test, feature = "cuda")))]
use {
    crate::device::upload::{Uploads, upload_once},
    candle_core::{Device, Tensor},
};

/// The documents that sequences are made of: attention never leaves one, and positions count from its first token.
///
/// A document is a run of tokens of a row; padding is a document, too. Cloning shares the values.
#[derive(Clone, Debug)]
pub struct DocumentStarts(Arc<Starts>);

#[derive(Debug)]
struct Starts {
    /// Of each token, the index in its row of the first token of its document.
    starts: Vec<u32>,
    /// Tokens of each document, row after row.
    lens: Vec<usize>,
    dims: (usize, usize),
    /// Kept for the devices that asked for them.
    #[cfg(any(feature = "cudnn", all(test, feature = "cuda")))]
    on_gpus: Uploads<OnGpu>,
}

/// What a GPU is given of documents.
#[cfg(any(feature = "cudnn", all(test, feature = "cuda")))]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum OnGpu {
    /// Of each document where it begins in tensors with so many values for each token, and its length.
    Ragged([usize; 3]),
    /// Of each place of each document the token, with as many places as the longest may have.
    Places,
}

impl DocumentStarts {
    /// Documents of `b` sequences of `t` tokens: `starts` has, row after row, for each token the index in its row of the first token of its
    /// document.
    ///
    /// # Errors
    /// Another number of values than `b * t`; a token whose document does not begin at the token itself or where that of the token before
    /// it does.
    pub fn new(starts: Vec<u32>, (b, t): (usize, usize)) -> Result<Self> {
        if starts.len() != b * t {
            bail!(
                "DocumentStarts: expected {} values for {b} sequences of {t} tokens, got {}",
                b * t,
                starts.len()
            )
        }
        let mut lens = Vec::new();
        for (row, starts) in starts.chunks(t.max(1)).enumerate() {
            for (i, &start) in starts.iter().enumerate() {
                let before = i.checked_sub(1).map(|before| starts[before]);
                if start as usize != i && Some(start) != before {
                    bail!(
                        "DocumentStarts: token {i} of sequence {row} has its document's start at {start}; expected {i}, as the first of one{}",
                        before.map_or(String::new(), |before| format!(
                            ", or {before}, as the token before it"
                        ))
                    )
                }
                match lens.last_mut() {
                    Some(len) if start as usize != i => *len += 1,
                    _ => lens.push(1),
                }
            }
        }
        Ok(Self(Arc::new(Starts {
            starts,
            lens,
            dims: (b, t),
            #[cfg(any(feature = "cudnn", all(test, feature = "cuda")))]
            on_gpus: Uploads::default(),
        })))
    }

    /// Number of sequences and of tokens in each, (b, t).
    pub fn dims(&self) -> (usize, usize) {
        self.0.dims
    }

    /// For each token, row after row, the index in its row of the first token of its document.
    pub fn starts(&self) -> &[u32] {
        &self.0.starts
    }

    /// Of each token its place in its document, from 0, row after row: what rotary embeddings turn by.
    pub fn positions(&self) -> impl Iterator<Item = u32> + '_ {
        let t = self.0.dims.1.max(1);
        let starts = self.0.starts.iter().enumerate();
        starts.map(move |(i, start)| (i % t) as u32 - start)
    }

    /// Number of tokens of each document, row after row.
    pub fn lens(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.lens.iter().copied()
    }

    /// The numbers on `device`, which gets them once.
    #[cfg(any(feature = "cudnn", all(test, feature = "cuda")))]
    pub(crate) fn on_gpu(
        &self,
        what: OnGpu,
        device: &Device,
        numbers: impl FnOnce() -> Vec<u32>,
    ) -> Result<Tensor> {
        upload_once(&self.0.on_gpus, what, device, numbers)
    }
}

impl PartialEq for DocumentStarts {
    fn eq(&self, other: &Self) -> bool {
        self.0.dims == other.0.dims && self.0.starts == other.0.starts
    }
}
