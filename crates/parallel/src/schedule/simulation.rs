//! How long the ranks of a pipeline work and wait, from the times of their passes.

use std::collections::HashMap;

use candle_core::{Result, bail};

use super::{Instruction, Plan};
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
}

/// A step that is not made, but reckoned.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Simulation {
    /// What each rank computes, and when.
    pub ranks: Vec<Vec<Timed>>,
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
        }
    }

    fn of(&self, instruction: Instruction) -> f64 {
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

impl Plan {
    /// The step with these times, where each rank begins an instruction as soon as it is free and has what it needs.
    ///
    /// # Errors
    /// Times of another number of stages, or times that are no numbers of 0 or more.
    pub fn simulate(&self, times: &Times) -> Result<Simulation> {
        let layout = self.layout();
        if times.stages.len() != layout.num_stages() {
            bail!(
                "times of {} stages; expected those of {}",
                times.stages.len(),
                layout.num_stages()
            );
        }
        let of_stages = times.stages.iter();
        let all = of_stages.flat_map(|it| [it.forward, it.input_grad, it.weight_grad]);
        if let Some(wrong) = all
            .chain([times.hop])
            .find(|time| !(0.0..f64::INFINITY).contains(time))
        {
            bail!("a time of {wrong}; expected 0 or more");
        }
        let mut ranks: Vec<Vec<Timed>> = vec![Vec::new(); layout.num_ranks()];
        // When what a unit needs is on its rank.
        let mut here = HashMap::new();
        loop {
            let mut has_moved = false;
            for (rank, done) in ranks.iter_mut().enumerate() {
                while let Some(&instruction) = self.ranks()[rank].get(done.len()) {
                    let unit = instruction.unit();
                    let needs = instruction
                        .input()
                        .filter(|&what| !Self::is_end(layout, unit, what));
                    let is_free = done.last().map_or(0.0, |timed| timed.end);
                    let start = match needs.map(|what| here.get(&(unit, what))) {
                        None => is_free,
                        Some(Some(at)) => is_free.max(*at),
                        Some(None) => break,
                    };
                    let end = start + times.of(instruction);
                    done.push(Timed {
                        instruction,
                        start,
                        end,
                    });
                    has_moved = true;
                    if let Some(what) = instruction.input()
                        && let Some(to) = Self::receiver(layout, unit, what)
                    {
                        let is_near = layout.rank_of(to.stage) == rank;
                        here.insert((to, what), end + if is_near { 0.0 } else { times.hop });
                    }
                }
            }
            if !has_moved {
                break;
            }
        }
        let ends = ranks.iter().flatten().map(|timed| timed.end);
        Ok(Simulation {
            makespan: ends.fold(0.0, f64::max),
            ranks,
        })
    }
}

impl Simulation {
    /// How long a rank computes.
    pub fn busy(&self, rank: usize) -> f64 {
        let timed = self.ranks[rank].iter();
        timed.map(|timed| timed.end - timed.start).sum()
    }

    /// The share of the step in which a rank does not compute.
    pub fn idle_share(&self, rank: usize) -> f64 {
        match self.makespan > 0.0 {
            true => 1.0 - self.busy(rank) / self.makespan,
            false => 0.0,
        }
    }
}
