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

use std::collections::BTreeSet;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
/// same head. It knows the parts of the other ranks, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    partition: Partition,
    /// Whose part this is, of those of the partition.
    rank: usize,
}

/// Which indices of one dim of a tensor the tensor-parallel ranks hold: the same on all of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Partition {
    dim: usize,
    /// Length of the dim.
    global: usize,
    /// Of each rank in their order; if it is one, of every rank.
    parts: Vec<Indices>,
}

/// Indices that the same ranks hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldRange {
    pub range: Range<usize>,
    /// Those ranks, rising, at least one.
    pub ranks: Vec<usize>,
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
    /// Indices `range` of dim `dim`, which has `global` of them; `range` may be empty. Every rank holds the same; where each has a part
    /// of its own, [`Self::of_ranks`] says whose which is.
    pub fn new(dim: usize, range: Range<usize>, global: usize) -> Self {
        Self::with_parts(dim, global, vec![range.into()], 0)
    }

    /// Of dim `dim`, which has `global` indices, those that this rank holds if `range_of` tells those of each rank of the group; they may be
    /// empty.
    pub fn of_ranks(
        dim: usize,
        global: usize,
        group: &ProcessGroup,
        range_of: impl Fn(usize) -> Range<usize>,
    ) -> Self {
        let parts = (0..group.world_size()).map(|rank| range_of(rank).into());
        Self::with_parts(dim, global, parts.collect(), group.rank())
    }

    fn with_parts(dim: usize, global: usize, parts: Vec<Indices>, rank: usize) -> Self {
        let partition = Partition { dim, global, parts };
        Self { partition, rank }
    }

    /// The part of a weight that joins others along their dim, one after the other, of which this rank has `parts`: fused queries,
    /// keys and values; the gate and the up projection.
    ///
    /// # Errors
    /// Parts of different dims, of different groups or beyond what they are parts of, and none at all.
    pub fn fused(parts: &[Self]) -> Result<Self> {
        let Some(first) = parts.iter().max_by_key(|part| part.partition.parts.len()) else {
            bail!("a fused weight joins at least one part");
        };
        let mut global = 0;
        let num_ranks = first.partition.parts.len();
        let mut ranges: Vec<Vec<Range<usize>>> = vec![Vec::new(); num_ranks];
        for part in parts {
            let Partition { dim, parts: of, .. } = &part.partition;
            if *dim != parts[0].dim() {
                bail!(
                    "a fused weight joins parts of dim {} and of dim {dim}; expected one dim",
                    parts[0].dim()
                );
            }
            if of.len() != 1 && of.len() != num_ranks {
                bail!(
                    "a fused weight joins parts of {} ranks and of {num_ranks}; expected one group",
                    of.len()
                );
            }
            for (rank, ranges) in ranges.iter_mut().enumerate() {
                let here = part.partition.held(rank).ranges();
                if here.last().is_some_and(|last| last.end > part.global()) {
                    bail!(
                        "a fused weight joins a part with indices {here:?} of {}; expected indices below that",
                        part.global()
                    );
                }
                let here = here.iter();
                ranges.extend(here.map(|range| global + range.start..global + range.end));
            }
            global += part.global();
        }
        let parts = ranges.into_iter().map(Indices::from_iter).collect();
        Ok(Self::with_parts(first.dim(), global, parts, first.rank))
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
        let range_of = |rank| part(global, rank, world_size);
        Ok(Self::of_ranks(dim, global, group, range_of))
    }

    /// The shard whose indices are groups of `unit` of this one's: heads to rows, for example.
    pub fn scaled(&self, unit: usize) -> Self {
        let parts = self.partition.parts.iter();
        let parts = parts.map(|held| held.scaled(unit)).collect();
        Self::with_parts(self.dim(), self.global() * unit, parts, self.rank)
    }

    /// The same part, of another dim.
    pub fn along(&self, dim: usize) -> Self {
        let mut shard = self.clone();
        shard.partition.dim = dim;
        shard
    }

    /// The dim that is cut.
    pub fn dim(&self) -> usize {
        self.partition.dim
    }

    /// Length of the dim in the global tensor.
    pub fn global(&self) -> usize {
        self.partition.global
    }

    /// Indices of the dim held here: rising ranges with gaps between them, none of them empty. They lie one after the other here.
    pub fn ranges(&self) -> &[Range<usize>] {
        self.held().ranges()
    }

    /// The first index held here; 0 if there is none.
    pub fn start(&self) -> usize {
        self.ranges().first().map_or(0, |first| first.start)
    }

    /// Number of indices held here.
    pub fn len(&self) -> usize {
        self.held().len()
    }

    /// Whether nothing is held here.
    pub fn is_empty(&self) -> bool {
        self.held().is_empty()
    }

    pub(crate) fn held(&self) -> &Indices {
        self.partition.held(self.rank)
    }

    pub(crate) fn partition(&self) -> &Partition {
        &self.partition
    }
}

impl Partition {
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The indices that a rank holds.
    pub fn held(&self, rank: usize) -> &Indices {
        match self.parts.as_slice() {
            [of_all] => of_all,
            parts => &parts[rank],
        }
    }

    /// The indices that any rank holds, some of them perhaps several times.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.parts.iter().flat_map(Indices::ranges)
    }

    /// The part of rank `rank`.
    pub fn shard(&self, rank: usize) -> Shard {
        Shard {
            rank: rank.min(self.parts.len() - 1),
            partition: self.clone(),
        }
    }

    /// An error unless it is of `num_ranks` ranks, which hold all of the dim of parameter `name`.
    pub fn check(&self, name: &str, num_ranks: usize) -> Result<()> {
        let of = self.parts.len();
        if of != 1 && of != num_ranks {
            bail!(
                "parameter {name} is divided over a group of {of} ranks; the tensor-parallel group has {num_ranks}\nhint: a Shard is of mesh.tp"
            );
        }
        let covered = self.pieces(num_ranks).into_iter().map(|held| held.range);
        if joined(covered) != joined(std::iter::once(0..self.global)) {
            let parts: Vec<_> = self.parts.iter().map(Indices::ranges).collect();
            bail!(
                "parameter {name}: the parts that ranks hold of dim {} do not cover 0..{}: {parts:?}\nhint: Shard::of_ranks tells which rank has \
                 which part",
                self.dim,
                self.global
            );
        }
        Ok(())
    }

    /// All indices, in pieces that the same ones of `num_ranks` ranks hold, rising.
    pub fn pieces(&self, num_ranks: usize) -> Vec<HeldRange> {
        let borders = self.ranges().flat_map(|range| [range.start, range.end]);
        let borders: BTreeSet<usize> = borders.collect();
        let borders: Vec<usize> = borders.into_iter().collect();
        let pieces = borders.windows(2).map(|ends| HeldRange {
            range: ends[0]..ends[1],
            ranks: (0..num_ranks)
                .filter(|&rank| self.held(rank).contains(ends[0]))
                .collect(),
        });
        pieces.filter(|held| !held.ranks.is_empty()).collect()
    }
}

/// Rising ranges of indices with gaps between them, none of them empty. In files and messages one range stands for itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    pub fn scaled(&self, unit: usize) -> Self {
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
