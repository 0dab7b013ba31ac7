//! Pipeline schedules as lists of instructions: pure functions of the ranks' stages and the number of micro-batches, which are checked
//! before anything runs, simulated, and carried out by [`Pipeline`](crate::Pipeline).

mod csv;
mod orders;
mod plan;
mod simulation;

use std::fmt;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::pipeline_layout::PipelineLayout;

pub use plan::Plan;
pub(crate) use plan::{Link, links};
pub use simulation::{Simulation, StageTimes, Timed, Times};

/// More stages than any model has layers.
const MAX_STAGES: usize = 4096;

/// A micro-batch in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    /// Stage of the model, from 0.
    pub stage: usize,
    /// Micro-batch of the step, from 0.
    pub micro_batch: usize,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "micro-batch {} in stage {}",
            self.micro_batch, self.stage
        )
    }
}

/// What passes between stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// The output of a stage, for the next one.
    Activation,
    /// The gradient of a stage's input, for the one before.
    Gradient,
}

/// One thing that a rank does. A schedule is the order of computing; messages follow from it: see [`Plan::with_messages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Instruction {
    /// The forward pass.
    Forward(Unit),
    /// The whole backward pass.
    Backward(Unit),
    /// Its input half: the gradient of the stage's input (B of Zero Bubble, arXiv:2401.10241).
    InputGrad(Unit),
    /// Its weight half (W).
    WeightGrad(Unit),
    /// Sends what the unit has given to the rank that needs it, without waiting.
    Send(Unit, Message),
    /// Posts the receive of what the unit needs, without waiting: the unit's own instruction does.
    Recv(Unit, Message),
}

impl Instruction {
    /// What it works on.
    pub fn unit(self) -> Unit {
        match self {
            Self::Forward(unit)
            | Self::Backward(unit)
            | Self::InputGrad(unit)
            | Self::WeightGrad(unit)
            | Self::Send(unit, _)
            | Self::Recv(unit, _) => unit,
        }
    }

    /// What it needs of a stage beside its own.
    pub(crate) fn input(self) -> Option<Message> {
        match self {
            Self::Forward(_) => Some(Message::Activation),
            Self::Backward(_) | Self::InputGrad(_) => Some(Message::Gradient),
            _ => None,
        }
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            Self::Forward(_) => "forward pass",
            Self::Backward(_) => "backward pass",
            Self::InputGrad(_) => "input gradient",
            Self::WeightGrad(_) => "weight gradient",
            Self::Send(_, Message::Activation) => "send of the output",
            Self::Send(_, Message::Gradient) => "send of the gradient",
            Self::Recv(_, Message::Activation) => "receive of the input",
            Self::Recv(_, Message::Gradient) => "receive of the gradient",
        };
        write!(f, "{what} of {}", self.unit())
    }
}

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

/// A way to order the work of a rank: see [`Schedule`] for those that there are. A function of the layout, the rank of the pipeline
/// group and the number of micro-batches is one, too.
pub trait Instructions: Send + Sync {
    /// What rank `rank` of the pipeline group computes, in this order. It is a function of these numbers alone: the ranks must fit each
    /// other.
    ///
    /// # Errors
    /// Stages or a number of micro-batches that this order is not made for.
    fn of_rank(
        &self,
        layout: &PipelineLayout,
        rank: usize,
        num_micro_batches: usize,
    ) -> Result<Vec<Instruction>>;

    /// Whether an input half also computes those gradients of weights that would keep more until their weight half than the forward pass has kept:
    /// see [`GradientSink::put_large`](crate::GradientSink::put_large).
    fn holds_little(&self) -> bool {
        false
    }
}

impl<F> Instructions for F
where
    F: Fn(&PipelineLayout, usize, usize) -> Vec<Instruction> + Send + Sync,
{
    fn of_rank(
        &self,
        layout: &PipelineLayout,
        rank: usize,
        num_micro_batches: usize,
    ) -> Result<Vec<Instruction>> {
        Ok(self(layout, rank, num_micro_batches))
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
