//! Pipeline schedules as lists of instructions: pure functions of the ranks' stages and the number of micro-batches.

use std::collections::{BTreeSet, HashMap};

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::pipeline_layout::PipelineLayout;

/// A micro-batch in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    /// Stage of the model, from 0.
    pub stage: usize,
    /// Micro-batch of the step, from 0.
    pub micro_batch: usize,
}

/// One thing that a rank does. What a unit needs of another rank is asked for ahead of time, and what it gives is sent at once, without
/// waiting: the order of computing is all that there is to say.
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
}

impl Instruction {
    /// What it works on.
    pub fn unit(self) -> Unit {
        match self {
            Self::Forward(unit)
            | Self::Backward(unit)
            | Self::InputGrad(unit)
            | Self::WeightGrad(unit) => unit,
        }
    }
}

/// The order in which ranks work on their micro-batches, of those that need one stage a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Schedule {
    /// All forward passes, then all backward passes (arXiv:1811.06965): every micro-batch's activations are alive at once.
    GPipe,
    /// One forward, one backward (PipeDream-Flush, arXiv:2104.04473, section 2.2): stage s of p holds the activations of at
    /// most min(p - s, m) of m micro-batches.
    OneForwardOneBackward,
}

/// A way to order the work of a rank: see [`Schedule`] for those that there are. A function of the layout, the rank of the pipeline
/// group and the number of micro-batches is one, too.
pub trait Instructions: Send + Sync {
    /// What rank `rank` of the pipeline group does, in this order. It is a function of these numbers alone: the ranks must fit each other.
    fn of_rank(
        &self,
        layout: &PipelineLayout,
        rank: usize,
        num_micro_batches: usize,
    ) -> Vec<Instruction>;
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
    ) -> Vec<Instruction> {
        self(layout, rank, num_micro_batches)
    }
}

impl Instructions for Schedule {
    /// The stages of a rank take turns, micro-batch by micro-batch; these schedules are meant for one stage a rank.
    fn of_rank(
        &self,
        layout: &PipelineLayout,
        rank: usize,
        num_micro_batches: usize,
    ) -> Vec<Instruction> {
        let stages: Vec<usize> = layout.stages_of(rank).collect();
        let forward = |micro_batch: usize| {
            let stages = stages.iter();
            let units = stages.map(move |&stage| Unit { stage, micro_batch });
            units.map(Instruction::Forward)
        };
        let backward = |micro_batch: usize| {
            let stages = stages.iter().rev();
            let units = stages.map(move |&stage| Unit { stage, micro_batch });
            units.map(Instruction::Backward)
        };
        let num_ahead = match self {
            Self::GPipe => num_micro_batches,
            Self::OneForwardOneBackward => {
                let after = layout.num_stages() - 1 - stages.first().copied().unwrap_or(0);
                after.min(num_micro_batches)
            }
        };
        let mut list = Vec::with_capacity(2 * stages.len() * num_micro_batches);
        (0..num_ahead).for_each(|index| list.extend(forward(index)));
        for index in num_ahead..num_micro_batches {
            list.extend(forward(index));
            list.extend(backward(index - num_ahead));
        }
        let rest = num_micro_batches - num_ahead..num_micro_batches;
        rest.for_each(|index| list.extend(backward(index)));
        list
    }
}

/// The forward passes of a rank, for an evaluation or for a text that is generated.
pub(super) fn forwards(
    layout: &PipelineLayout,
    rank: usize,
    num_micro_batches: usize,
) -> Vec<Instruction> {
    let units = layout.stages_of(rank).flat_map(|stage| {
        (0..num_micro_batches).map(move |micro_batch| Unit { stage, micro_batch })
    });
    units.map(Instruction::Forward).collect()
}

/// An error unless the lists, one for each rank, are whole and fit each other: of each unit of a rank a forward pass, then a backward pass, whole
/// or in its two halves, and no more; and what passes between two ranks is needed in the order in which it is given. It is the same on
/// every rank.
pub(super) fn check(
    lists: &[Vec<Instruction>],
    layout: &PipelineLayout,
    num_micro_batches: usize,
) -> Result<()> {
    for (rank, list) in lists.iter().enumerate() {
        check_rank(list, layout, rank, num_micro_batches)?;
    }
    let ranks = layout.ranks();
    let ends = ranks.windows(2).filter(|ends| ends[0] != ends[1]);
    let links = ends.flat_map(|ends| [(ends[0], ends[1], true), (ends[1], ends[0], false)]);
    for (from, to, is_forward) in links.collect::<BTreeSet<_>>() {
        let (sent, needed) = messages(lists, layout, from, to, is_forward);
        if sent != needed {
            bail!(
                "the schedule has rank {from} of the pipeline send to rank {to} in another order than this one needs it: the outputs or \
                 gradients {sent:?}, and {needed:?}"
            );
        }
    }
    Ok(())
}

/// The units for which a rank gives something to another one, in the order in which it does and in which they are needed.
fn messages(
    lists: &[Vec<Instruction>],
    layout: &PipelineLayout,
    from: usize,
    to: usize,
    is_forward: bool,
) -> (Vec<Unit>, Vec<Unit>) {
    let is_wanted = |instruction: &&Instruction| match instruction {
        Instruction::Forward(_) => is_forward,
        Instruction::Backward(_) | Instruction::InputGrad(_) => !is_forward,
        Instruction::WeightGrad(_) => false,
    };
    let after = |stage: usize| match is_forward {
        true => Some(stage + 1).filter(|&stage| stage < layout.num_stages()),
        false => stage.checked_sub(1),
    };
    let before = |stage: usize| match is_forward {
        true => stage.checked_sub(1),
        false => Some(stage + 1).filter(|&stage| stage < layout.num_stages()),
    };
    let units = |rank: usize| lists[rank].iter().filter(is_wanted).map(|i| i.unit());
    let sent = units(from).filter_map(|unit| {
        let stage = after(unit.stage).filter(|&stage| layout.rank_of(stage) == to)?;
        Some(Unit { stage, ..unit })
    });
    let is_needed = |unit: &Unit| {
        let source = before(unit.stage).map(|stage| layout.rank_of(stage));
        source == Some(from)
    };
    (sent.collect(), units(to).filter(is_needed).collect())
}

/// An error unless the list is whole.
fn check_rank(
    list: &[Instruction],
    layout: &PipelineLayout,
    rank: usize,
    num_micro_batches: usize,
) -> Result<()> {
    let mut last: HashMap<Unit, Instruction> = HashMap::new();
    for &instruction in list {
        let unit = instruction.unit();
        let is_own = layout.ranks().get(unit.stage) == Some(&rank);
        let before = last.insert(unit, instruction);
        let is_in_order = matches!(
            (before, instruction),
            (None, Instruction::Forward(_))
                | (
                    Some(Instruction::Forward(_)),
                    Instruction::Backward(_) | Instruction::InputGrad(_)
                )
                | (Some(Instruction::InputGrad(_)), Instruction::WeightGrad(_))
        );
        if !is_own || unit.micro_batch >= num_micro_batches || !is_in_order {
            bail!(
                "the schedule has {instruction:?} after {before:?} on rank {rank} of the pipeline, which has the stages {:?} and \
                 {num_micro_batches} micro-batches; expected of each of these units a forward pass and then a backward pass, or its two \
                 halves",
                layout.stages_of(rank).collect::<Vec<_>>()
            );
        }
    }
    let is_done = |instruction: &&Instruction| {
        matches!(
            instruction,
            Instruction::Backward(_) | Instruction::WeightGrad(_)
        )
    };
    let num_done = last.values().filter(is_done).count();
    let num_units = layout.stages_of(rank).count() * num_micro_batches;
    if num_done != num_units {
        bail!(
            "the schedule ends with {num_done} of the {num_units} units of rank {rank} of the pipeline done; expected a backward pass of each"
        );
    }
    Ok(())
}
