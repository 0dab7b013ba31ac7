//! What a rank does in a step, as a list.

use std::fmt;

use candle_core::Result;

use crate::pipeline_layout::PipelineLayout;

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

/// One thing that a rank does. A schedule is the order of computing; messages follow from it: see [`Plan::with_messages`](crate::Plan::with_messages).
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

/// A way to order the work of a rank: see [`Schedule`](crate::Schedule) for those that there are. A function of the layout, the rank of the pipeline
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
