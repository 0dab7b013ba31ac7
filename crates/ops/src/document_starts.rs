//! Several documents in one sequence: where each begins.

use candle_core::{Device, Result, Tensor, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::upload;

/// The documents that sequences are made of: attention never leaves one, and positions count from its first token.
///
/// A document is a run of tokens of a row; padding is a document, too. Cloning shares the values.
#[derive(Clone, Debug)]
pub struct DocumentStarts(Arc<Starts>);

#[derive(Debug)]
struct Starts {
    /// Of each token, the index in its row of the first token of its document.
    starts: Vec<u32>,
    dims: (usize, usize),
    /// Copies on GPUs that asked for one.
    on_gpus: Mutex<Vec<Tensor>>,
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
            }
        }
        Ok(Self(Arc::new(Starts {
            starts,
            dims: (b, t),
            on_gpus: Mutex::default(),
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
        let mut positions = self.positions().peekable();
        std::iter::from_fn(move || {
            let mut len = positions.next()? as usize + 1;
            while positions.next_if(|&position| position > 0).is_some() {
                len += 1;
            }
            Some(len)
        })
    }

    /// Where the document of token `i` of sequence `row` begins.
    pub(crate) fn start(&self, row: usize, i: usize) -> usize {
        self.0.starts[row * self.0.dims.1 + i] as usize
    }

    /// What a query at `i` sees of the positions `seen`, which end with its own.
    pub(crate) fn within(&self, row: usize, seen: Range<usize>) -> Range<usize> {
        seen.start.max(self.start(row, seen.end - 1))..seen.end
    }

    /// [`Self::starts`] on `device`, (b, t) u32; a GPU gets them once.
    ///
    /// # Errors
    /// When the device cannot take them.
    pub fn on(&self, device: &Device) -> Result<Tensor> {
        let copy = || upload(self.0.starts.clone(), self.0.dims, device);
        if device.is_cpu() {
            return copy();
        }
        let mut copies = self
            .0
            .on_gpus
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = copies.iter().find(|copy| copy.device().same_device(device)) {
            return Ok(known.clone());
        }
        let copy = copy()?;
        copies.push(copy.clone());
        Ok(copy)
    }
}

impl PartialEq for DocumentStarts {
    fn eq(&self, other: &Self) -> bool {
        self.0.dims == other.0.dims && self.0.starts == other.0.starts
    }
}
