//! Rows of tokens as attention sees them: of which document each is, and where in it.

use candle_core::{Result, bail};
use std::ops::Range;
use std::sync::Arc;

use super::document_starts::DocumentStarts;
#[cfg(feature = "cudnn")]
use {
    super::rectangle::Rectangle,
    std::sync::{Mutex, PoisonError},
};
#[cfg(feature = "cuda")]
use {
    crate::device::upload::{Uploads, upload_once},
    candle_core::{Device, Tensor},
};

/// A stretch of one document whose tokens lie one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the document in its micro-batch.
    pub document: usize,
    /// Position in the document of the first token.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
}

/// The rows that a rank computes, in the order in which they lie in memory: whole sequences, packed documents, what is cut from them
/// for context-parallel ranks, or tokens that go on after others.
///
/// Sequences come one after the other, and in each of them documents, in the order of their numbers; the rows of a document are in the order
/// of their positions, of which some may be missing. So what a query sees of keys that lie like that is one stretch. Cloning shares the values.
#[derive(Clone, Debug, PartialEq)]
pub struct Runs(Arc<Inner>);

#[derive(Debug, PartialEq)]
struct Inner {
    runs: Vec<Run>,
    /// Of each sequence its rows and its runs.
    sequences: Vec<Sequence>,
    /// Tokens of each document, wherever they are.
    document_lens: Vec<usize>,
    /// (b, t) of tensors with these rows.
    dims: (usize, usize),
    /// If these are whole sequences from their first token on: their documents if they have several.
    whole: Option<Option<DocumentStarts>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Sequence {
    rows: Range<usize>,
    runs: Range<usize>,
}

impl Runs {
    /// `b` sequences of `t` tokens, each one document.
    pub fn sequences(b: usize, t: usize) -> Self {
        Self::new(of_each(b, 0, t), vec![t; b], (b, t), Some(None))
    }

    /// `t` tokens of each of `b` sequences, after the first `num_before`.
    pub fn after(b: usize, num_before: usize, t: usize) -> Self {
        Self::new(
            of_each(b, num_before, t),
            vec![num_before + t; b],
            (b, t),
            None,
        )
    }

    fn new(
        of_sequences: Vec<Vec<Run>>,
        document_lens: Vec<usize>,
        dims: (usize, usize),
        whole: Option<Option<DocumentStarts>>,
    ) -> Self {
        let (mut rows, mut runs) = (0, Vec::new());
        let sequences = of_sequences.into_iter().map(|of_sequence| {
            let first = (rows, runs.len());
            rows += of_sequence.iter().map(|run| run.len).sum::<usize>();
            runs.extend(of_sequence);
            Sequence {
                rows: first.0..rows,
                runs: first.1..runs.len(),
            }
        });
        let sequences = sequences.collect();
        Self(Arc::new(Inner {
            runs,
            sequences,
            document_lens,
            dims,
            whole,
        }))
    }

    /// (b, t) of tensors with these rows; (1, rows) if sequences are of different lengths.
    pub fn dims(&self) -> (usize, usize) {
        self.0.dims
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.0.dims.0 * self.0.dims.1
    }

    /// If these are whole sequences, their documents if they have several. The CPU has one way for all rows.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn whole(&self) -> Option<Option<&DocumentStarts>> {
        self.0.whole.as_ref().map(Option::as_ref)
    }

    /// The runs, in the order of memory.
    pub fn runs(&self) -> &[Run] {
        &self.0.runs
    }

    /// Of each row its position in its document.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        let runs = self.0.runs.iter();
        runs.flat_map(|run| run.start..run.start + run.len)
    }

    /// Of each run the number of tokens of its document, wherever they are.
    pub fn document_lens(&self) -> impl Iterator<Item = usize> + '_ {
        let runs = self.0.runs.iter();
        runs.map(|run| self.0.document_lens[run.document])
    }

    /// What context-parallel rank `rank` of `num_ranks` computes of these rows, and which they are. Each document is cut into `2 * num_ranks`
    /// pieces whose sizes differ by at most one, of which the rank has the piece `rank` and the one that is as far from the end: so that all ranks have as many tokens,
    /// and as many pairs of queries and keys. Which pieces are longer goes on from document to document, so that short ones come to all ranks.
    pub fn cut(&self, num_ranks: usize, rank: usize) -> (Self, Vec<u32>) {
        if num_ranks == 1 {
            return (self.clone(), (0..self.num_rows() as u32).collect());
        }
        let num_pieces = 2 * num_ranks;
        let (mut next_longer, mut row) = (0, 0);
        let mut rows = Vec::new();
        for run in &self.0.runs {
            let (shortest, num_longer) = (run.len / num_pieces, run.len % num_pieces);
            for piece in 0..num_pieces {
                let place = (piece + num_pieces - next_longer) % num_pieces;
                let len = shortest + usize::from(place < num_longer);
                if piece.min(num_pieces - 1 - piece) == rank {
                    rows.extend((row..row + len).map(|row| row as u32));
                }
                row += len;
            }
            next_longer = (next_longer + num_longer) % num_pieces;
        }
        (self.of_rows(&rows), rows)
    }

    /// Some of these rows.
    ///
    /// # Errors
    /// Rows that do not ascend, or that there are not.
    pub fn take(&self, rows: &[u32]) -> Result<Self> {
        let are_ordered = rows.is_sorted_by(|a, b| a < b);
        if !are_ordered
            || rows
                .last()
                .is_some_and(|last| *last as usize >= self.num_rows())
        {
            bail!(
                "Runs: expected ascending numbers of {} rows",
                self.num_rows()
            )
        }
        Ok(self.of_rows(rows))
    }

    fn of_rows(&self, rows: &[u32]) -> Self {
        let mut taken = rows.iter().map(|row| *row as usize).peekable();
        let mut end = 0;
        let of_sequences = self.0.sequences.iter().map(|sequence| {
            let mut own = Vec::new();
            for run in &self.0.runs[sequence.runs.clone()] {
                let first = end;
                end += run.len;
                while let Some(row) = taken.next_if(|row| *row < end) {
                    let start = run.start + (row - first);
                    push_run(
                        &mut own,
                        Run {
                            document: run.document,
                            start,
                            len: 1,
                        },
                    );
                }
            }
            own
        });
        let of_sequences = of_sequences.collect();
        Self::new(
            of_sequences,
            self.0.document_lens.clone(),
            (1, rows.len()),
            None,
        )
    }

    /// The rows of several ranks as one, and of each of them its place among those of the ranks, one rank after the other.
    ///
    /// # Errors
    /// Rows of other sequences.
    pub fn join(parts: &[Self]) -> Result<(Self, Vec<u32>)> {
        let Some(first) = parts.first() else {
            bail!("Runs: the rows of no ranks; expected at least one")
        };
        let num_sequences = first.0.sequences.len();
        let others = |part: &Self| {
            part.0.sequences.len() != num_sequences || part.0.document_lens != first.0.document_lens
        };
        if parts.iter().any(others) {
            bail!("Runs: the ranks have rows of other sequences")
        }
        let mut rows = Vec::new();
        let mut starts = vec![0; parts.len()];
        for rank in 1..parts.len() {
            starts[rank] = starts[rank - 1] + parts[rank - 1].num_rows();
        }
        let of_sequences = (0..num_sequences).map(|sequence| {
            let mut all: Vec<(Run, usize)> = Vec::new();
            for (part, start) in parts.iter().zip(&mut starts) {
                for run in &part.0.runs[part.0.sequences[sequence].runs.clone()] {
                    all.push((*run, *start));
                    *start += run.len;
                }
            }
            all.sort_by_key(|(run, _)| (run.document, run.start));
            let mut joined: Vec<Run> = Vec::new();
            for (run, row) in all {
                rows.extend((row..row + run.len).map(|row| row as u32));
                push_run(&mut joined, run);
            }
            joined
        });
        let of_sequences: Vec<_> = of_sequences.collect();
        let dims = (1, rows.len());
        let lens = first.0.document_lens.clone();
        let runs = || of_sequences.iter().flatten();
        let is_whole = |run: &Run| run.start == 0 && run.len == lens[run.document];
        let whole = match runs().all(is_whole) {
            true => {
                let mut starts = Vec::with_capacity(rows.len());
                for run in runs() {
                    starts.extend(std::iter::repeat_n(starts.len() as u32, run.len));
                }
                Some(Some(DocumentStarts::new(starts, dims)?))
            }
            false => None,
        };
        Ok((Self::new(of_sequences, lens, dims, whole), rows))
    }
}

/// The run of each of `b` sequences that have `t` tokens after `start`.
fn of_each(b: usize, start: usize, len: usize) -> Vec<Vec<Run>> {
    let run = |document| Run {
        document,
        start,
        len,
    };
    (0..b).map(|document| vec![run(document)]).collect()
}

/// Adds a run, to the one before if it goes on where that ends.
fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.document == run.document && last.start + last.len == run.start => {
            last.len += run.len;
        }
        _ => runs.push(run),
    }
}

impl From<&DocumentStarts> for Runs {
    fn from(documents: &DocumentStarts) -> Self {
        let (b, t) = documents.dims();
        let lens: Vec<usize> = documents.lens().collect();
        let mut rest = lens.iter().copied().enumerate();
        let of_sequence = |_| {
            let (mut runs, mut rows) = (Vec::new(), 0);
            while rows < t {
                let Some((document, len)) = rest.next() else {
                    break;
                };
                runs.push(Run {
                    document,
                    start: 0,
                    len,
                });
                rows += len;
            }
            runs
        };
        let of_sequences = (0..b).map(of_sequence).collect();
        Self::new(of_sequences, lens, (b, t), Some(Some(documents.clone())))
    }
}

/// Rows of queries, and the rows of keys and values that they see a part of: keys of their own document up to their own position, and from
/// where their window begins. Cloning shares the values.
#[derive(Clone, Debug)]
pub struct AttentionRows {
    queries: Runs,
    keys: Runs,
    /// What GPUs were given of them, each for a window and tiles of so many keys.
    #[cfg(feature = "cuda")]
    on_gpus: Arc<Uploads<(Option<usize>, usize)>>,
    /// What they are, each with a window.
    #[cfg(feature = "cudnn")]
    rectangles: Arc<Mutex<Vec<OfWindow>>>,
}

#[cfg(feature = "cudnn")]
type OfWindow = (Option<usize>, Option<Rectangle>);

impl PartialEq for AttentionRows {
    fn eq(&self, other: &Self) -> bool {
        self.queries == other.queries && self.keys == other.keys
    }
}

impl From<DocumentStarts> for AttentionRows {
    /// Queries and keys of the same documents.
    fn from(documents: DocumentStarts) -> Self {
        Runs::from(&documents).into()
    }
}

impl From<Runs> for AttentionRows {
    /// Queries and keys of the same rows.
    fn from(rows: Runs) -> Self {
        Self::new(rows.clone(), rows)
    }
}

/// The rows of a sequence among those of queries and those of keys.
#[derive(Clone, Debug)]
pub(crate) struct SequenceRows {
    pub(crate) queries: Range<usize>,
    pub(crate) keys: Range<usize>,
}

impl AttentionRows {
    /// Rows of q, and of k and v.
    pub fn new(queries: Runs, keys: Runs) -> Self {
        Self {
            queries,
            keys,
            #[cfg(feature = "cuda")]
            on_gpus: Arc::default(),
            #[cfg(feature = "cudnn")]
            rectangles: Arc::default(),
        }
    }

    /// As [`Self::rectangle`], found once for each window.
    #[cfg(feature = "cudnn")]
    pub(crate) fn known_rectangle(&self, window: Option<usize>) -> Option<Rectangle> {
        let mut known = self
            .rectangles
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((_, rectangle)) = known.iter().find(|(of, _)| *of == window) {
            return *rectangle;
        }
        let rectangle = self.rectangle(window);
        known.push((window, rectangle));
        rectangle
    }

    /// Whether queries and keys are of as many sequences.
    pub(crate) fn are_of_one(&self) -> bool {
        self.queries.0.sequences.len() == self.keys.0.sequences.len()
    }

    /// Of q.
    pub fn queries(&self) -> &Runs {
        &self.queries
    }

    /// Of k and v.
    pub fn keys(&self) -> &Runs {
        &self.keys
    }

    /// What a GPU's kernels read, once for each window: of each query the first key that it sees, counted in its tensor's sequence, and of each
    /// the end; then of each tile of keys the first query that may see one of them, and of each the end.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(
        &self,
        window: Option<usize>,
        tile: usize,
        device: &Device,
    ) -> Result<Tensor> {
        let table = || self.table(window, tile);
        upload_once(&self.on_gpus, (window, tile), device, table)
    }

    #[cfg(feature = "cuda")]
    fn table(&self, window: Option<usize>, tile: usize) -> Vec<u32> {
        let (b, t) = self.queries.dims();
        // Queries of one tensor may see keys of several.
        let num_keys = self.keys.num_rows() / b.max(1);
        let mut seen = self.seen(window);
        for (index, sequence) in self.sequences().into_iter().enumerate() {
            // Counted from the first key of the sequence of the tensor, which has all of them if the queries' has.
            let of_tensor = if b > 1 { index } else { 0 };
            let first = (sequence.keys.start - of_tensor * num_keys) as u32;
            for seen in &mut seen[sequence.queries] {
                *seen = seen.start + first..seen.end + first;
            }
        }
        let num_tiles = num_keys.div_ceil(tile);
        // Neither the first key nor the end goes back from a query of a sequence to the next.
        let queries = (0..b).flat_map(|sequence| {
            let seen = &seen[sequence * t..][..t];
            (0..num_tiles).map(move |of_tile| {
                let (start, end) = ((of_tile * tile) as u32, ((of_tile + 1) * tile) as u32);
                let first = seen.partition_point(|seen| seen.end <= start);
                let last = seen.partition_point(|seen| seen.start < end);
                first as u32..last.max(first) as u32
            })
        });
        let queries: Vec<_> = queries.collect();
        let firsts_and_ends = |ranges: &[Range<u32>]| -> Vec<u32> {
            let firsts = ranges.iter().map(|range| range.start);
            firsts.chain(ranges.iter().map(|range| range.end)).collect()
        };
        [firsts_and_ends(&seen), firsts_and_ends(&queries)].concat()
    }

    /// The rows of each sequence.
    pub(crate) fn sequences(&self) -> Vec<SequenceRows> {
        let pairs = self.queries.0.sequences.iter().zip(&self.keys.0.sequences);
        let rows = pairs.map(|(queries, keys)| SequenceRows {
            queries: queries.rows.clone(),
            keys: keys.rows.clone(),
        });
        rows.collect()
    }

    /// If queries and keys are the same whole sequences, their documents if they have several.
    #[cfg(feature = "cuda")]
    pub(crate) fn whole(&self) -> Option<Option<&DocumentStarts>> {
        let is_same = Arc::ptr_eq(&self.queries.0, &self.keys.0);
        self.queries.whole().filter(|_| is_same)
    }

    /// Of each query the keys that it sees, as places among those of its sequence; an empty range at no particular place if there are none.
    pub(crate) fn seen(&self, window: Option<usize>) -> Vec<Range<u32>> {
        let mut seen = Vec::with_capacity(self.queries.num_rows());
        let window = window.unwrap_or(usize::MAX);
        for (queries, keys) in self.queries.0.sequences.iter().zip(&self.keys.0.sequences) {
            let keys = &self.keys.0.runs[keys.runs.clone()];
            // Where the keys of the document begin, among the runs and among the rows.
            let (mut run, mut row) = (0, 0);
            for query in &self.queries.0.runs[queries.runs.clone()] {
                while run < keys.len() && keys[run].document < query.document {
                    row += keys[run].len;
                    run += 1;
                }
                let of_document = keys[run..].iter();
                let of_document = of_document.take_while(|key| key.document == query.document);
                let num_before = |position: usize| -> usize {
                    let of_run = |key: &Run| position.saturating_sub(key.start).min(key.len);
                    of_document.clone().map(of_run).sum()
                };
                seen.extend((query.start..query.start + query.len).map(|position| {
                    let first = num_before((position + 1).saturating_sub(window));
                    (row + first) as u32..(row + num_before(position + 1)) as u32
                }));
            }
        }
        seen
    }

    /// How many pairs of a query and a key that it sees there are.
    pub fn num_pairs(&self, window: Option<usize>) -> usize {
        self.seen(window).iter().map(ExactSizeIterator::len).sum()
    }
}
