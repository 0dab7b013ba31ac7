//! How a parameter lies on the ranks of a mesh.
//!
//! | axis | values | gradient of a rank |
//! |---|---|---|
//! | tp | a [`Placement`], which the layer chooses | complete, or a summand where several ranks hold the same values |
//! | pp | whole on every stage with a block that uses it | a summand: stages that share a parameter are *tied* |
//! | dp | whole on every replica (ZeRO divides what belongs to it, not the parameter) | a summand |
//! | cp | as on dp: context-parallel ranks are replicas with other rows (`Mesh::replicas` are both) | a summand |
//!
//! What follows from it: of the ranks of a replica that hold a value, the first *owns* it, counts it in the norm and writes
//! it to files; where the gradients of holders are summands they are summed before anything else is done with them.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// Part `index` of `0..len` cut into `parts` contiguous parts whose lengths differ by at most one.
pub fn part(len: usize, index: usize, parts: usize) -> Range<usize> {
    (index * len / parts)..((index + 1) * len / parts)
}

/// How a parameter lies on the tensor-parallel ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank holds all of it.
    Replicated(Gradient),
    /// Every rank holds a part. Parts may overlap: the gradients of what is held twice are summed over its holders.
    Sharded(Shard),
}

/// What a rank's gradient of a replicated parameter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gradient {
    /// The whole gradient, the same on every rank: the ranks compute the same from the same. A norm between two
    /// tensor-parallel regions, the bias of a row-parallel layer.
    Complete,
    /// One summand of it: the ranks use the parameter on different values. A norm of queries inside a tensor-parallel
    /// region, whose ranks have different heads; a norm under sequence parallelism, whose ranks have different tokens.
    Partial,
}

/// A part of one dim of a global tensor: of most weights one range of indices, of a fused one a range of each weight that it
/// joins. Parts may be uneven, and they may overlap: with fewer key/value heads than tensor-parallel ranks, neighbours hold the
/// same head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    dim: usize,
    held: Indices,
    global: usize,
}

impl From<Shard> for Placement {
    fn from(shard: Shard) -> Self {
        Self::Sharded(shard)
    }
}

impl Placement {
    /// The part held here, if it is not all.
    pub fn shard(&self) -> Option<&Shard> {
        match self {
            Self::Replicated(_) => None,
            Self::Sharded(shard) => Some(shard),
        }
    }
}

impl Shard {
    /// Indices `range` of dim `dim`, which has `global` of them; `range` may be empty.
    pub fn new(dim: usize, range: Range<usize>, global: usize) -> Self {
        Self {
            dim,
            held: Indices::from(range),
            global,
        }
    }

    /// The part of a weight that joins others along their dim, one after the other, of which this rank has `parts`: fused queries,
    /// keys and values; the gate and the up projection.
    ///
    /// # Errors
    /// Parts of different dims or beyond what they are parts of, and none at all.
    pub fn fused(parts: &[Self]) -> Result<Self> {
        let Some(first) = parts.first() else {
            bail!("a fused weight joins at least one part");
        };
        if let Some(other) = parts.iter().find(|part| part.dim != first.dim) {
            bail!(
                "a fused weight joins parts of dim {} and of dim {}; expected one dim",
                first.dim,
                other.dim
            );
        }
        let mut global = 0;
        let mut ranges = Vec::new();
        for part in parts {
            if part
                .held
                .0
                .last()
                .is_some_and(|last| last.end > part.global)
            {
                bail!(
                    "a fused weight joins a part with indices {:?} of {}; expected indices below that",
                    part.held.0,
                    part.global
                );
            }
            let here = part.held.0.iter();
            ranges.extend(here.map(|range| global + range.start..global + range.end));
            global += part.global;
        }
        Ok(Self {
            dim: first.dim,
            held: Indices(joined(ranges.into_iter())),
            global,
        })
    }

    /// The part of this rank when `global` indices are divided evenly (by at most one apart) over the group.
    ///
    /// # Errors
    /// Fewer indices than ranks.
    pub fn even(dim: usize, global: usize, group: &ProcessGroup) -> Result<Self> {
        let world_size = group.world_size();
        if global < world_size {
            bail!(
                "cannot divide {global} indices of dim {dim} over {world_size} tensor-parallel ranks: each needs at \
                 least one\nhint: use a smaller tensor-parallel degree"
            );
        }
        let held = part(global, group.rank(), world_size);
        Ok(Self::new(dim, held, global))
    }

    /// The shard whose indices are groups of `unit` of this one's: heads to rows, for example.
    pub fn scaled(&self, unit: usize) -> Self {
        Self {
            dim: self.dim,
            held: self.held.scaled(unit),
            global: self.global * unit,
        }
    }

    /// The same part, of another dim.
    pub fn along(&self, dim: usize) -> Self {
        Self {
            dim,
            ..self.clone()
        }
    }

    /// The dim that is cut.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Length of the dim in the global tensor.
    pub fn global(&self) -> usize {
        self.global
    }

    /// Indices of the dim held here: rising ranges with gaps between them, none of them empty. They lie one after the other here.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.held.0
    }

    /// The first index held here; 0 if there is none.
    pub fn start(&self) -> usize {
        self.held.0.first().map_or(0, |first| first.start)
    }

    /// Number of indices held here.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing is held here.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(crate) fn held(&self) -> &Indices {
        &self.held
    }
}

/// Values that lie one after the other in a whole tensor, and in what is held of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Row-major offsets into the whole tensor.
    pub global: Range<usize>,
    /// Row-major offsets into what is held.
    pub local: Range<usize>,
}

/// Rising ranges of indices with gaps between them, none of them empty. In files and messages one range stands for itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RangeOrRanges", into = "RangeOrRanges")]
pub(crate) struct Indices(Vec<Range<usize>>);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum RangeOrRanges {
    Range(Range<usize>),
    Ranges(Vec<Range<usize>>),
}

impl From<RangeOrRanges> for Indices {
    fn from(written: RangeOrRanges) -> Self {
        match written {
            RangeOrRanges::Range(range) => range.into(),
            RangeOrRanges::Ranges(ranges) => Self(ranges),
        }
    }
}

impl From<Indices> for RangeOrRanges {
    fn from(Indices(ranges): Indices) -> Self {
        match ranges.as_slice() {
            [] => Self::Range(0..0),
            [range] => Self::Range(range.clone()),
            _ => Self::Ranges(ranges),
        }
    }
}

impl From<Range<usize>> for Indices {
    fn from(range: Range<usize>) -> Self {
        Self((!range.is_empty()).then_some(range).into_iter().collect())
    }
}

impl FromIterator<Range<usize>> for Indices {
    /// Of rising ranges that do not overlap.
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(ranges: I) -> Self {
        Self(joined(ranges.into_iter()))
    }
}

impl Indices {
    /// The ranges, and the place of the first index of each among all.
    pub fn places(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        let starts = self.0.iter().scan(0, |next, range| {
            let start = *next;
            *next += range.len();
            Some(start)
        });
        starts.zip(&self.0)
    }

    /// The place among all of the first index of `range`, which is not empty, if all of it is held.
    pub fn place(&self, range: &Range<usize>) -> Option<usize> {
        let holds = |held: &Range<usize>| held.start <= range.start && range.end <= held.end;
        let (start, held) = self.places().find(|(_, held)| holds(held))?;
        Some(start + range.start - held.start)
    }

    pub fn contains(&self, index: usize) -> bool {
        self.0.iter().any(|range| range.contains(&index))
    }

    pub fn ranges(&self) -> &[Range<usize>] {
        &self.0
    }

    pub fn len(&self) -> usize {
        self.0.iter().map(Range::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether they are rising, with gaps between them, and less than `end`.
    pub fn are_valid(&self, end: usize) -> bool {
        let is_rising = self.0.windows(2).all(|pair| pair[0].end < pair[1].start);
        is_rising
            && self.0.iter().all(|range| range.start < range.end)
            && self.0.last().is_none_or(|last| last.end <= end)
    }

    /// The runs of a tensor of shape `dims`, of whose dim `dim` these indices are held, in rising order; of those the values at offsets
    /// `part` into what is held.
    pub fn runs(
        &self,
        dims: &[usize],
        dim: usize,
        part: Range<usize>,
    ) -> impl Iterator<Item = Run> + use<> {
        let width = dims.get(dim).copied().unwrap_or(1);
        let inner: usize = dims.iter().skip(dim + 1).product();
        // All of it is one run.
        let is_all = width > 0 && self.len() == width;
        let unit = if is_all {
            dims.iter().product::<usize>() / width
        } else {
            inner
        };
        let (held, stride) = (self.scaled(unit), width * unit);
        let len = held.len();
        let rows = match len {
            0 => 0..0,
            _ => part.start / len..part.end.div_ceil(len),
        };
        let runs = rows.flat_map(move |row| {
            let runs = held.places().map(|(place, range)| {
                let (start, local) = (row * stride + range.start, row * len + place);
                (start, local..local + range.len())
            });
            runs.collect::<Vec<_>>()
        });
        runs.filter_map(move |(start, local)| {
            let both = intersect(&local, &part);
            let start = start + both.start - local.start;
            (!both.is_empty()).then(|| Run {
                global: start..start + both.len(),
                local: both,
            })
        })
    }

    fn scaled(&self, unit: usize) -> Self {
        let scaled = |range: &Range<usize>| range.start * unit..range.end * unit;
        self.0.iter().map(scaled).collect()
    }
}

/// The part of `a` that lies in `b`; empty if there is none.
pub(crate) fn intersect(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.clamp(b.start, b.end)..a.end.clamp(b.start, b.end)
}

/// `range`, counted from `start`, which is not beyond it.
pub(crate) fn offset_by(range: &Range<usize>, start: usize) -> Range<usize> {
    range.start - start..range.end - start
}

/// Ranges in rising order, those that follow each other without a gap as one; empty ones vanish.
pub(crate) fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}
