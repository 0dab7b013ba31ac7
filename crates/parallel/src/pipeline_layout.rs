//! Which stage has which blocks of a model, and which rank has which stages.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

use crate::placement::part;

/// The stages of a pipeline, in the order of the model: the blocks of each, and the rank of the pipeline group that has it. A rank may
/// have several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineLayout(Arc<[StagePlace]>);

/// A stage of the pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StagePlace {
    blocks: Range<usize>,
    rank: usize,
}

impl PipelineLayout {
    /// Stage r on rank r: the first and the last of `num_blocks` blocks go with the first and the last stage and those between are divided
    /// evenly.
    ///
    /// # Errors
    /// More stages than blocks between the first and the last one.
    pub fn even(num_blocks: usize, num_stages: usize) -> Result<Self> {
        let stages = (0..num_stages).map(|rank| {
            let blocks = stage_blocks(num_blocks, rank, num_stages)?;
            Ok(StagePlace { blocks, rank })
        });
        Ok(Self(stages.collect::<Result<_>>()?))
    }

    /// `num_blocks[s]` blocks in stage s, which rank `ranks[s]` has.
    ///
    /// # Errors
    /// Lists of unequal lengths, a stage without blocks, a rank without a stage.
    pub fn new(num_blocks: &[usize], ranks: &[usize]) -> Result<Self> {
        let held: BTreeSet<usize> = ranks.iter().copied().collect();
        let is_gapless = held.iter().copied().eq(0..held.len());
        if num_blocks.len() != ranks.len()
            || ranks.is_empty()
            || !is_gapless
            || num_blocks.contains(&0)
        {
            bail!(
                "a pipeline of stages with {num_blocks:?} blocks on ranks {ranks:?}; expected for each stage a number of blocks > 0 and a rank, and \
                 for each rank a stage"
            );
        }
        let mut next = 0;
        let stages = num_blocks.iter().zip(ranks).map(|(len, &rank)| {
            let start = next;
            next += len;
            let blocks = start..next;
            StagePlace { blocks, rank }
        });
        Ok(Self(stages.collect()))
    }

    /// How many stages there are.
    pub fn num_stages(&self) -> usize {
        self.0.len()
    }

    /// How many ranks there are.
    pub fn num_ranks(&self) -> usize {
        self.0.iter().map(|stage| stage.rank + 1).max().unwrap_or(0)
    }

    /// How many blocks the model has.
    pub fn num_blocks(&self) -> usize {
        self.0.last().map_or(0, |stage| stage.blocks.end)
    }

    /// The blocks of stage `stage`.
    pub fn blocks(&self, stage: usize) -> Range<usize> {
        self.0[stage].blocks.clone()
    }

    /// Of each stage the rank that has it.
    pub fn ranks(&self) -> Vec<usize> {
        self.0.iter().map(|stage| stage.rank).collect()
    }

    /// The rank that has stage `stage`.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.0[stage].rank
    }

    /// The stages of rank `rank`, in rising order.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.0.len()).filter(move |&stage| self.0[stage].rank == rank)
    }

    /// The stage that has block `block`.
    pub fn stage_of_block(&self, block: usize) -> Option<usize> {
        self.0
            .iter()
            .position(|stage| stage.blocks.contains(&block))
    }
}

/// The blocks of stage `stage` when the first and the last of `num_blocks` blocks go with the first and the last stage
/// and those between are divided evenly.
///
/// # Errors
/// More stages than blocks between the first and the last one; a model without blocks.
pub fn stage_blocks(num_blocks: usize, stage: usize, num_stages: usize) -> Result<Range<usize>> {
    if num_stages == 1 && num_blocks > 0 {
        return Ok(0..num_blocks);
    }
    if num_blocks < 2 {
        bail!(
            "a model of {num_blocks} blocks on {num_stages} pipeline stages; expected at least a first and a last block\nhint: a model that is one \
             block is trained with pp = 1"
        );
    }
    let between = num_blocks - 2;
    if between < num_stages {
        bail!(
            "pp({num_stages}) > number of layers({between}): each pipeline stage needs at least one layer\nhint: use \
             pp <= {}",
            between.max(1)
        );
    }
    let middle = part(between, stage, num_stages);
    let start = if stage == 0 { 0 } else { 1 + middle.start };
    let end = if stage + 1 == num_stages {
        num_blocks
    } else {
        1 + middle.end
    };
    Ok(start..end)
}
