//! Samples: the sequences that a data set is cut into and put together from.
//!
//! A plain text of n tokens gives pieces of T = seq_len tokens and a last one of what is left; the last token of a piece has the first
//! one of the next as its target, so that each token of the text but the first is learned once. Any other record is a piece as it is. Pieces
//! are put into sequences of T tokens by first-fit, in the order of the data.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use candle_ops::IGNORE_INDEX;

use super::first_fit::FirstFit;
use super::sample_config::{Overlong, SampleConfig};
use super::sample_order::permutation;
use crate::records::RecordFormat;
use crate::tokens::{IndexEntry, RecordKind, Tokens};
use crate::words::counted;

/// Epoch whose permutation chooses what is held out: no run gets there.
const HELD_OUT: u64 = u64::MAX;

/// Tokens of a record that are in a sequence together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    record: u32,
    start: u32,
    len: u32,
}

/// The samples of a data set; cloning shares them.
#[derive(Clone, Debug)]
pub struct Samples {
    tokens: Tokens,
    config: SampleConfig,
    pieces: Arc<[Piece]>,
    /// Of each sequence, the first of its pieces; and one more.
    starts: Arc<[usize]>,
    num_overlong: usize,
    num_without_target: usize,
    num_cut_off: usize,
    num_cut_tokens: usize,
}

/// A sequence, as the model gets it and as a person may read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Token ids, at most `seq_len`.
    pub input_ids: Vec<u32>,
    /// Of each position, the id that the model is to write next; [`IGNORE_INDEX`] where it learns nothing.
    pub targets: Vec<u32>,
    /// Of each position, whether the model learns to write its token: in this sequence, or, of the first token of a later piece of a
    /// text, in the one before.
    pub has_loss: Vec<bool>,
    /// Of each position, the first one of its record: what a token sees begins there. All 0 without a document mask.
    pub document_starts: Vec<u32>,
    /// Number of tokens of each piece.
    pub piece_lens: Vec<usize>,
}

impl Samples {
    /// Cuts the records of `tokens` and puts them together.
    ///
    /// # Errors
    /// `seq_len` is 0; a record is too long and that is to be an error, which names it by its number; nothing to learn is left.
    pub fn new(tokens: &Tokens, config: SampleConfig) -> Result<Self> {
        if config.seq_len == 0 {
            bail!("seq_len is 0, expected at least one token per sequence");
        }
        let mut samples = Self {
            tokens: tokens.clone(),
            config,
            pieces: Arc::default(),
            starts: Arc::default(),
            num_overlong: 0,
            num_without_target: 0,
            num_cut_off: 0,
            num_cut_tokens: 0,
        };
        let pieces = samples.cut()?;
        if pieces.is_empty() {
            bail!(
                "nothing to learn is left of the data: of {} records {} are without a token to learn and {} are longer than {} tokens",
                tokens.num_records(),
                samples.num_without_target,
                samples.num_overlong,
                samples.config.seq_len
            );
        }
        let pieces = samples.weighted(pieces);
        samples.pack(&pieces);
        Ok(samples)
    }

    /// These records without some, and the others: `fraction` of the records and of the pieces of texts, rounded, but
    /// at least one, chosen by `seed`. Each part is put into sequences by itself.
    ///
    /// # Errors
    /// A fraction that leaves nothing to train on.
    pub fn hold_out(&self, fraction: f64, seed: u64) -> Result<[Self; 2]> {
        let mut pieces = self.pieces.to_vec();
        // In the order of the data.
        pieces.sort_by_key(|piece| (piece.record, piece.start));
        let [trained, held_out] = held_out(pieces.len(), fraction, seed)?;
        Ok([trained, held_out].map(|chosen| {
            let chosen: Vec<Piece> = chosen.iter().map(|&index| pieces[index]).collect();
            let mut samples = self.clone();
            samples.pack(&chosen);
            samples
        }))
    }

    /// How many of the records, or pieces of texts, `others` have the same tokens of, too.
    pub fn num_shared_with(&self, others: &Self) -> usize {
        let mut counts: HashMap<(u64, u32, u32), usize> = HashMap::new();
        for piece in self.pieces.iter() {
            *counts.entry(self.content_of(piece)).or_default() += 1;
        }
        let others = others.pieces.iter().map(|piece| others.content_of(piece));
        others.filter_map(|content| counts.remove(&content)).sum()
    }

    /// What tells pieces with other tokens apart.
    fn content_of(&self, piece: &Piece) -> (u64, u32, u32) {
        let record = &self.tokens.index()[piece.record as usize];
        (record.checksum, piece.start, piece.len)
    }

    /// Number of records and pieces of texts.
    pub fn num_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// All pieces, by the part of the data that they are of.
    fn cut(&mut self) -> Result<Vec<(u32, Piece)>> {
        let seq_len = u32::try_from(self.config.seq_len).unwrap_or(u32::MAX);
        let mut pieces = Vec::new();
        for (record, entry) in self.tokens.index().iter().enumerate() {
            let IndexEntry {
                len, first_target, ..
            } = *entry;
            let is_overlong = entry.kind() == RecordKind::Whole && len > seq_len;
            self.num_overlong += usize::from(is_overlong);
            match (is_overlong, self.config.overlong) {
                (true, Overlong::Drop) => continue,
                (true, Overlong::Error) => bail!(
                    "record {} of the data has {len} tokens, more than a sequence of {seq_len}, and that is to be an error\nhint: \
                     choose longer sequences, or let it be truncated or dropped",
                    record + 1
                ),
                _ => {}
            }
            let used = match entry.kind() {
                RecordKind::Whole => len.min(seq_len),
                RecordKind::Text => len,
            };
            if first_target.max(1) >= used {
                self.num_without_target += 1;
                self.num_cut_off += usize::from(first_target.max(1) < len);
                continue;
            }
            self.num_cut_tokens += (len - used) as usize;
            let mut start = 0;
            // A token that is alone and last has no target.
            while start + 1 < used {
                let len = seq_len.min(used - start);
                let record = record as u32;
                pieces.push((entry.origin.source, Piece { record, start, len }));
                start += len;
            }
        }
        Ok(pieces)
    }

    /// The pieces that are in an epoch: of a part of the data with weight w and n pieces, w n.
    fn weighted(&self, pieces: Vec<(u32, Piece)>) -> Vec<Piece> {
        let mut in_epoch = Vec::with_capacity(pieces.len());
        for of_source in pieces.chunk_by(|(a, _), (b, _)| a == b) {
            let source = of_source[0].0;
            let weight = self
                .config
                .weights
                .get(source as usize)
                .copied()
                .unwrap_or(1.0);
            let count = ((weight * of_source.len() as f64).round() as usize).max(1);
            for _ in 0..count / of_source.len() {
                in_epoch.extend(of_source.iter().map(|(_, piece)| *piece));
            }
            let mut rest = permutation(
                of_source.len(),
                self.config.seed,
                u64::MAX - u64::from(source),
            );
            rest.truncate(count % of_source.len());
            rest.sort_unstable();
            in_epoch.extend(rest.into_iter().map(|index| of_source[index].1));
        }
        in_epoch
    }

    fn pack(&mut self, pieces: &[Piece]) {
        let bins: Vec<usize> = match self.config.packing {
            true => {
                let mut bins = FirstFit::new(self.config.seq_len, pieces.len());
                pieces
                    .iter()
                    .map(|piece| bins.put(piece.len as usize))
                    .collect()
            }
            false => (0..pieces.len()).collect(),
        };
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        // Stable: pieces of a sequence stay in the order of the data.
        order.sort_by_key(|&index| bins[index]);
        let is_first =
            |place: &usize| *place == 0 || bins[order[*place]] != bins[order[*place - 1]];
        let starts = (0..pieces.len()).filter(is_first).chain([pieces.len()]);
        self.starts = starts.collect();
        self.pieces = order.iter().map(|&index| pieces[index]).collect();
    }

    fn pieces_of(&self, index: usize) -> &[Piece] {
        &self.pieces[self.starts[index]..self.starts[index + 1]]
    }

    /// Sample `index` of [`Self::len`].
    ///
    /// # Errors
    /// There is no such sample; the tokens cannot be read.
    pub fn get(&self, index: usize) -> Result<Sample> {
        if index >= self.len() {
            bail!("there is no sample {index} of {}", self.len());
        }
        let mut sample = Sample::default();
        for piece in self.pieces_of(index) {
            self.append(&mut sample, piece)?;
        }
        Ok(sample)
    }

    fn append(&self, sample: &mut Sample, piece: &Piece) -> Result<()> {
        let len = piece.len as usize;
        let (ids, has_loss) = self
            .tokens
            .part(piece.record as usize, self.readable(piece))?;
        let targets = (1..=len).map(|next| match has_loss.get(next) {
            Some(true) => ids[next],
            _ => IGNORE_INDEX,
        });
        let document_start = match self.config.document_mask {
            true => sample.input_ids.len() as u32,
            false => 0,
        };
        sample.targets.extend(targets);
        sample.input_ids.extend(&ids[..len]);
        sample.has_loss.extend(&has_loss[..len]);
        sample
            .document_starts
            .extend(std::iter::repeat_n(document_start, len));
        sample.piece_lens.push(len);
        Ok(())
    }

    /// The tokens of a piece and, of a text that goes on, the next one.
    fn readable(&self, piece: &Piece) -> Range<usize> {
        let entry = &self.tokens.index()[piece.record as usize];
        let (start, end) = (piece.start as usize, (piece.start + piece.len) as usize);
        match entry.kind() {
            RecordKind::Text => start..(end + 1).min(entry.len as usize),
            RecordKind::Whole => start..end,
        }
    }

    /// Number of samples, at least 1.
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Tokens of the longest of them.
    pub fn longest(&self) -> usize {
        let lens = (0..self.len()).map(|index| self.num_tokens(index));
        lens.max().unwrap_or(0)
    }

    /// Always false: data without a sample is an error in [`Samples::new`].
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of sample `index`, which must be one.
    pub(crate) fn num_tokens(&self, index: usize) -> usize {
        self.pieces_of(index)
            .iter()
            .map(|piece| piece.len as usize)
            .sum()
    }

    /// What they are, in words: records by their spelling, their tokens, and the sequences. A text of which some sequences are among them
    /// counts as one, and so does a record that is in several.
    pub fn summary(&self) -> String {
        let mut is_there = vec![false; self.tokens.num_records()];
        for piece in self.pieces.iter() {
            is_there[piece.record as usize] = true;
        }
        let mut counts: BTreeMap<RecordFormat, usize> = BTreeMap::new();
        for (entry, _) in self
            .tokens
            .index()
            .iter()
            .zip(is_there)
            .filter(|(_, is_there)| *is_there)
        {
            *counts.entry(entry.origin.format).or_default() += 1;
        }
        let records = counts
            .into_iter()
            .map(|(format, count)| format.counted(count));
        let num_tokens = self.pieces.iter().map(|piece| piece.len as usize).sum();
        format!(
            "{}, {} in {}",
            records.collect::<Vec<_>>().join(", "),
            counted(num_tokens, "token"),
            counted(self.len(), "sequence")
        )
    }

    /// Whether some have several records, each of which sees itself alone.
    pub fn are_packed(&self) -> bool {
        let mut samples = self.starts.windows(2);
        self.config.document_mask && samples.any(|pieces| pieces[1] - pieces[0] > 1)
    }

    /// How they were made.
    pub fn config(&self) -> &SampleConfig {
        &self.config
    }

    /// The tokens that they were made of.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// Records that were truncated and have nothing to learn in what is left of them; they are not among the samples.
    pub fn num_cut_off(&self) -> usize {
        self.num_cut_off
    }

    /// Tokens that truncated records among the samples have lost.
    pub fn num_cut_tokens(&self) -> usize {
        self.num_cut_tokens
    }

    /// Records that are longer than a sequence and no plain text.
    pub fn num_overlong(&self) -> usize {
        self.num_overlong
    }
}

/// Which of `num_records` a run trains on, and which it holds out: `fraction` of them, rounded, but at least one,
/// chosen by `seed`. Both in rising order.
///
/// # Errors
/// A fraction that leaves none to train on.
fn held_out(num_records: usize, fraction: f64, seed: u64) -> Result<[Vec<usize>; 2]> {
    let num_held_out = ((num_records as f64 * fraction).round() as usize).max(1);
    if num_held_out >= num_records {
        bail!(
            "{fraction} of {} leaves none to train on\nhint: give more data, or other data for the evaluation",
            counted(num_records, "record")
        );
    }
    let mut order = permutation(num_records, seed, HELD_OUT);
    let mut training = order.split_off(num_held_out);
    order.sort_unstable();
    training.sort_unstable();
    Ok([training, order])
}
