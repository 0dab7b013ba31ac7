//! The schedules that there are, by name.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::instruction::{Instruction, Instructions};
use super::orders;
use crate::pipeline_layout::PipelineLayout;

/// More stages than any model has layers.
const MAX_STAGES: usize = 4096;

/// The order in which ranks work on their micro-batches. Where a rank has several stages these take turns with groups of as many
/// micro-batches as there are ranks, or few more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum Schedule {
    /// One forward, one backward: with one stage on each of p ranks, rank r holds at most p - r micro-batches.
    ///
    /// PipeDream-Flush (arXiv:2104.04473, section 2.2). With several stages on a rank interleaved 1F1B (the same, section 2.2).
    #[cfg_attr(feature = "clap", value(name = "1f1b"))]
    OneForwardOneBackward,
    /// All forward passes, then all backward passes.
    ///
    /// Every micro-batch's activations are alive at once (arXiv:1811.06965). With several stages on a rank all micro-batches go through one
    /// before the next (breadth-first, arXiv:2211.05953): so weights that are [offloaded](crate::Offload::params) are read twice in a step,
    /// however many micro-batches it has, also without a pipeline.
    #[cfg_attr(feature = "clap", value(name = "gpipe"))]
    GPipe,
    /// Gradients of weights wait until a rank would be idle; each rank holds about p micro-batches.
    ///
    /// ZB-H1 (arXiv:2401.10241): no rank has more than p micro-batches under way if p divides their number. Gradients that would keep more
    /// than the forward pass has kept do not wait, and none of blocks that are computed again. With several stages on a rank its
    /// interleaved form.
    #[cfg_attr(feature = "clap", value(name = "zb-h1"))]
    ZeroBubbleH1,
    /// More forward passes ahead: up to 2p - 1 micro-batches.
    ///
    /// ZB-2p (the same, ZB-H2). Its last stages begin to work on a step before the first ones have ended the one before only if that need
    /// not be awaited: here it must.
    #[cfg_attr(feature = "clap", value(name = "zb-2p"))]
    ZeroBubble2p,
    /// Two stages a rank, there and back over the ranks; about p micro-batches.
    ///
    /// ZBV (arXiv:2405.15362): the second stages lie in the order of the ranks from the last one to the first.
    #[cfg_attr(feature = "clap", value(name = "zbv"))]
    ZeroBubbleV,
    /// Stages as those of zbv, both ways at once; 2p micro-batches or more.
    ///
    /// The V form of DualPipe (arXiv:2412.19437).
    #[cfg_attr(feature = "clap", value(name = "dualpipev"))]
    DualPipeV,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::GPipe,
        Self::OneForwardOneBackward,
        Self::ZeroBubbleH1,
        Self::ZeroBubble2p,
        Self::ZeroBubbleV,
        Self::DualPipeV,
    ];

    /// The name by which people and the command line know it.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::ZeroBubbleH1 => "zb-h1",
            Self::ZeroBubble2p => "zb-2p",
            Self::ZeroBubbleV => "zbv",
            Self::DualPipeV => "dualpipev",
        }
    }

    /// Stages that a rank has unless told otherwise.
    pub fn virtual_stages(self) -> usize {
        match self {
            Self::ZeroBubbleV | Self::DualPipeV => 2,
            _ => 1,
        }
    }

    /// Of each of `num_ranks` · `virtual_stages` stages the rank that has it: around the ranks, or to the last and back.
    ///
    /// # Errors
    /// A number of stages a rank that the schedule does not take.
    pub fn placement(self, num_ranks: usize, virtual_stages: usize) -> Result<Vec<usize>> {
        let is_interleaved = matches!(
            self,
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubbleH1
        );
        let least = self.virtual_stages();
        if virtual_stages < least || (virtual_stages > least && !is_interleaved) {
            let stages = match (least, is_interleaved) {
                (1, false) => "1 stage",
                (1, true) => "1 stage or more",
                _ => "2 stages",
            };
            bail!(
                "the schedule {} has {stages} on each rank, got {virtual_stages}\nhint: virtual stages {least} (--virtual-stages {least})",
                self.name()
            );
        }
        let num_stages = num_ranks.saturating_mul(virtual_stages);
        if num_stages > MAX_STAGES {
            bail!(
                "{num_ranks} ranks of a pipeline with {virtual_stages} stages each; expected {MAX_STAGES} stages or fewer"
            );
        }
        let rank_of = |stage: usize| match self {
            Self::ZeroBubbleV | Self::DualPipeV if stage >= num_ranks => num_stages - 1 - stage,
            _ => stage % num_ranks.max(1),
        };
        Ok((0..num_stages).map(rank_of).collect())
    }
}

impl Instructions for Schedule {
    fn of_rank(
        &self,
        layout: &PipelineLayout,
        rank: usize,
        num_micro_batches: usize,
    ) -> Result<Vec<Instruction>> {
        orders::of_rank(*self, layout, rank, num_micro_batches)
    }

    /// ZB-H1 is to hold what 1F1B does.
    fn holds_little(&self) -> bool {
        *self == Self::ZeroBubbleH1
    }
}
