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

/// What a micro-batch costs in a model's blocks, in any unit of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockCosts {
    /// The first block, such as an embedding.
    pub first: f64,
    /// Each of those between.
    pub layer: f64,
    /// The last block, the head with its loss.
    pub last: f64,
}

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

    /// Stages with so many layers each, which rank `ranks[s]` has; the first block goes with the first stage, and the last one with the last.
    ///
    /// # Errors
    /// As for [`Self::new`]; stages but the first and the last one without layers.
    pub fn of_layers(num_layers: &[usize], ranks: &[usize]) -> Result<Self> {
        let mut num_blocks = num_layers.to_vec();
        if let Some(first) = num_blocks.first_mut() {
            *first += 1;
        }
        if let Some(last) = num_blocks.last_mut() {
            *last += 1;
        }
        Self::new(&num_blocks, ranks)
    }

    /// Stages that rank `ranks[s]` has, of `num_layers` layers between the first and the last block, one or more in each, such that the
    /// rank with the most to do has the least that it can have.
    ///
    /// # Errors
    /// As for [`Self::new`]; more stages than layers.
    pub fn balanced(num_layers: usize, ranks: &[usize], costs: &BlockCosts) -> Result<Self> {
        let num_stages = ranks.len();
        if num_stages <= 1 {
            return Self::of_layers(&[num_layers], ranks);
        }
        check_num_layers(num_layers, ranks)?;
        let mut layers = vec![1; num_stages];
        let of_stage = |layers: &[usize], stage: usize| {
            let ends = [(0, costs.first), (num_stages - 1, costs.last)];
            let ends = ends.into_iter().filter(|(end, _)| *end == stage);
            layers[stage] as f64 * costs.layer + ends.map(|(_, cost)| cost).sum::<f64>()
        };
        for _ in num_stages..num_layers {
            let of_rank = |stage: usize| {
                let own = (0..num_stages).filter(|&other| ranks[other] == ranks[stage]);
                own.map(|stage| of_stage(&layers, stage)).sum::<f64>()
            };
            // The rank with the least to do, and of its stages that with the least; of equals the first.
            let next = (0..num_stages).min_by(|&a, &b| {
                let stages = || of_stage(&layers, a).total_cmp(&of_stage(&layers, b));
                of_rank(a).total_cmp(&of_rank(b)).then_with(stages)
            });
            layers[next.unwrap_or(0)] += 1;
        }
        Self::of_layers(&layers, ranks)
    }

    /// The layers of each stage: its blocks but the model's first and last one.
    pub fn num_layers(&self) -> Vec<usize> {
        let last = self.num_blocks().saturating_sub(1);
        let of_stage = |stage: &StagePlace| {
            let layers = stage.blocks.clone();
            layers.filter(|&block| 0 < block && block < last).count()
        };
        self.0.iter().map(of_stage).collect()
    }

    /// How many stages there are.
    pub fn num_stages(&self) -> usize {
        self.0.len()
    }

    /// How many ranks there are.
    pub fn num_ranks(&self) -> usize {
        self.0.iter().map(|stage| stage.rank + 1).max().unwrap_or(0)
    }

    /// An error unless the stages lie on `pp` ranks.
    pub(crate) fn check_ranks(&self, pp: usize) -> Result<()> {
        let num_ranks = self.num_ranks();
        if num_ranks != pp {
            bail!(
                "the stages lie on {num_ranks} ranks; expected as many as the pipeline has, {pp}"
            );
        }
        Ok(())
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

/// An error if there are fewer layers than stages, which lie on these ranks.
fn check_num_layers(num_layers: usize, ranks: &[usize]) -> Result<()> {
    let num_stages = ranks.len();
    if num_layers >= num_stages {
        return Ok(());
    }
    let pp = ranks.iter().collect::<BTreeSet<_>>().len();
    let most = (num_layers / (num_stages / pp.max(1)).max(1)).max(1);
    if pp == num_stages {
        bail!(
            "pp({pp}) > number of layers({num_layers}): each pipeline stage needs at least one layer\nhint: use pp <= {most}"
        );
    }
    let virtual_stages = num_stages / pp;
    let hint = match num_layers / pp {
        0 => format!("use pp <= {most}"),
        fewer => format!(
            "use pp <= {most}, or {fewer} virtual stages or fewer with a schedule that takes them"
        ),
    };
    bail!(
        "pp({pp}) x virtual stages({virtual_stages}) = {num_stages} > number of layers({num_layers}): each pipeline stage needs at least one \
         layer\nhint: {hint}"
    )
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
    check_num_layers(between, &(0..num_stages).collect::<Vec<_>>())?;
    let middle = part(between, stage, num_stages);
    let start = if stage == 0 { 0 } else { 1 + middle.start };
    let end = if stage + 1 == num_stages {
        num_blocks
    } else {
        1 + middle.end
    };
    Ok(start..end)
}
