//! How long the ranks of a pipeline work and wait, from the times of what they do.

use candle_core::{Result, bail};

use super::Instruction;
use crate::pipeline_layout::PipelineLayout;

/// What a micro-batch takes in a stage, in any unit of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTimes {
    /// The forward pass.
    pub forward: f64,
    /// The input half of the backward pass.
    pub input_grad: f64,
    /// Its weight half.
    pub weight_grad: f64,
}

/// The times of a pipeline.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Times {
    /// Of each stage.
    pub stages: Vec<StageTimes>,
    /// From the end of a pass to the moment at which another rank has what it gave.
    pub hop: f64,
    /// What moves weights, gradients and the optimizer's state.
    pub moves: MoveTimes,
}

/// What it takes to move and to update values beside the passes, in the unit of their times: nothing, by default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct MoveTimes {
    /// Of each collective of replicas, whatever it moves.
    pub latency: f64,
    /// Of a byte that a rank sends to other replicas.
    pub replica_byte: f64,
    /// Of a byte that it sends to those with which it divides a second copy of weights.
    pub copy_byte: f64,
    /// Of a byte that goes to where values are kept away, or comes from there.
    pub offload_byte: f64,
    /// Of a value that is updated.
    pub update_value: f64,
}

/// An instruction with its times.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Timed {
    /// What is done.
    pub instruction: Instruction,
    /// When it begins; the first one of all begins at 0.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// How long the rank computes meanwhile; it waits for the rest.
    pub busy: f64,
}

/// A step that is not made, but reckoned.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Simulation {
    /// What each rank computes, and when.
    pub ranks: Vec<Vec<Timed>>,
    /// When the last rank ends its passes.
    pub passes: f64,
    /// The time of the step: when the last rank ends.
    pub makespan: f64,
}

impl Times {
    /// The same times for each rank of `layout`, divided evenly between its stages.
    pub fn even(of_rank: StageTimes, layout: &PipelineLayout) -> Self {
        let mut num_stages = vec![0; layout.num_ranks()];
        (layout.ranks().iter()).for_each(|&rank| num_stages[rank] += 1);
        let of_stage = |rank: &usize| {
            let num_stages = f64::from(num_stages[*rank]);
            StageTimes {
                forward: of_rank.forward / num_stages,
                input_grad: of_rank.input_grad / num_stages,
                weight_grad: of_rank.weight_grad / num_stages,
            }
        };
        Self {
            stages: layout.ranks().iter().map(of_stage).collect(),
            hop: 0.0,
            moves: MoveTimes::default(),
        }
    }

    /// An error unless there are numbers for each stage of `layout`.
    pub(crate) fn check(&self, layout: &PipelineLayout) -> Result<()> {
        if self.stages.len() != layout.num_stages() {
            bail!(
                "times of {} stages; expected those of {}",
                self.stages.len(),
                layout.num_stages()
            );
        }
        let of_stages = self.stages.iter();
        let all = of_stages.flat_map(|it| [it.forward, it.input_grad, it.weight_grad]);
        let MoveTimes {
            latency,
            replica_byte,
            copy_byte,
            offload_byte,
            update_value,
        } = self.moves;
        let moves = [latency, replica_byte, copy_byte, offload_byte, update_value];
        let mut all = all.chain([self.hop]).chain(moves);
        match all.find(|time| !(0.0..f64::INFINITY).contains(time)) {
            Some(wrong) => bail!("a time of {wrong}; expected 0 or more"),
            None => Ok(()),
        }
    }

    pub(crate) fn of(&self, instruction: Instruction) -> f64 {
        let times = &self.stages[instruction.unit().stage];
        match instruction {
            Instruction::Forward(_) => times.forward,
            Instruction::Backward(_) => times.input_grad + times.weight_grad,
            Instruction::InputGrad(_) => times.input_grad,
            Instruction::WeightGrad(_) => times.weight_grad,
            Instruction::Send(..) | Instruction::Recv(..) => 0.0,
        }
    }
}

impl Simulation {
    /// How long a rank computes.
    pub fn busy(&self, rank: usize) -> f64 {
        let timed = self.ranks[rank].iter();
        timed.map(|timed| timed.busy).sum()
    }

    /// The share of the step in which a rank does not compute.
    pub fn idle_share(&self, rank: usize) -> f64 {
        match self.makespan > 0.0 {
            true => 1.0 - self.busy(rank) / self.makespan,
            false => 0.0,
        }
    }
}
