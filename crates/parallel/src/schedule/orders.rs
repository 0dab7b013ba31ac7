//! The closed forms of the schedules.

use std::collections::VecDeque;

use candle_core::{Result, bail};

use super::{Instruction, Schedule, Unit};
use crate::pipeline_layout::PipelineLayout;

/// What rank `rank` computes.
pub(super) fn of_rank(
    schedule: Schedule,
    layout: &PipelineLayout,
    rank: usize,
    m: usize,
) -> Result<Vec<Instruction>> {
    let stages: Vec<usize> = layout.stages_of(rank).collect();
    let p = layout.num_ranks();
    let expected = schedule.placement(p, stages.len())?;
    if layout.ranks() != expected {
        bail!(
            "the stages lie on the ranks {:?}, which is not what the schedule {} is made for; expected {expected:?}",
            layout.ranks(),
            schedule.name()
        );
    }
    if m == 0 {
        bail!("a step without micro-batches; expected 1 or more");
    }
    // The ranks after this one.
    let after = p - 1 - rank;
    let in_turns = |warm_up_of_group: fn(usize) -> usize, lag| {
        let turns = Turns::new(&stages, p, m);
        let warm_up = (stages.len() - 1) * turns.group + warm_up_of_group(after);
        turns.list(warm_up, lag)
    };
    Ok(match schedule {
        Schedule::GPipe => Turns::new(&stages, m, m).list(stages.len() * m, None),
        Schedule::OneForwardOneBackward if stages.len() == 1 => in_turns(|after| after, None),
        Schedule::OneForwardOneBackward => in_turns(|after| 2 * after, None),
        Schedule::ZeroBubbleH1 => in_turns(|after| after, Some(rank)),
        Schedule::ZeroBubble2p => in_turns(|after| 2 * after, Some(2 * rank)),
        Schedule::ZeroBubbleV => zero_bubble_v(&stages, p, rank, m),
        Schedule::DualPipeV if m < 2 * p => bail!(
            "the schedule {} needs two micro-batches for each rank: {} or more for pp {p}, got {m}\nhint: a larger global batch, smaller \
             micro-batches, or the schedule zbv",
            schedule.name(),
            2 * p
        ),
        Schedule::DualPipeV => dual_pipe_v(&stages, p, rank, m),
    })
}

/// The units of a rank in the order of their forward passes and of their backward passes: groups of micro-batches go through all stages of
/// the rank before the next group.
struct Turns {
    forward: Vec<Unit>,
    backward: Vec<Unit>,
    /// Micro-batches of the first group, the largest one.
    group: usize,
}

impl Turns {
    /// Groups of `len` micro-batches or, where this does not divide `m`, of sizes that differ by 1, the larger ones first.
    fn new(stages: &[usize], len: usize, m: usize) -> Self {
        let rounds = (m / len).max(1);
        let (size, num_larger) = (m / rounds, m % rounds);
        let start = |round: usize| round * size + round.min(num_larger);
        let groups = (0..rounds).map(|round| start(round)..start(round + 1));
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for group in groups {
            let of = |stage: usize| {
                let group = group.clone();
                group.map(move |micro_batch| Unit { stage, micro_batch })
            };
            forward.extend(stages.iter().flat_map(|&stage| of(stage)));
            backward.extend(stages.iter().rev().flat_map(|&stage| of(stage)));
        }
        Self {
            forward,
            backward,
            group: start(1),
        }
    }

    /// `warm_up` forward passes, then one forward and one backward pass in turn, then backward passes: whole ones, or halves of which the second
    /// one comes `lag` units after the first one.
    fn list(self, warm_up: usize, lag: Option<usize>) -> Vec<Instruction> {
        let mut list = Vec::new();
        let mut forward = self.forward.into_iter().map(Instruction::Forward);
        list.extend(forward.by_ref().take(warm_up));
        let mut waiting = VecDeque::new();
        for unit in self.backward {
            list.extend(forward.next());
            let Some(lag) = lag else {
                list.push(Instruction::Backward(unit));
                continue;
            };
            list.push(Instruction::InputGrad(unit));
            waiting.push_back(Instruction::WeightGrad(unit));
            if waiting.len() > lag {
                list.extend(waiting.pop_front());
            }
        }
        list.extend(waiting);
        list
    }
}

/// The list of a rank with two stages, in the making: each stage's micro-batches come in their order.
#[derive(Default)]
struct Pair {
    stages: [usize; 2],
    list: Vec<Instruction>,
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Units whose weight half is to come.
    waiting: VecDeque<Unit>,
}

impl Pair {
    fn of(stages: &[usize]) -> Self {
        Self {
            stages: [stages[0], stages[1]],
            ..Self::default()
        }
    }

    fn forward(&mut self, which: usize) {
        let (stage, micro_batch) = (self.stages[which], self.forwards[which]);
        self.forwards[which] += 1;
        self.list
            .push(Instruction::Forward(Unit { stage, micro_batch }));
    }

    fn next_backward(&mut self, which: usize) -> Unit {
        let (stage, micro_batch) = (self.stages[which], self.backwards[which]);
        self.backwards[which] += 1;
        Unit { stage, micro_batch }
    }

    /// The whole backward pass.
    fn backward(&mut self, which: usize) {
        let unit = self.next_backward(which);
        self.list.push(Instruction::Backward(unit));
    }

    /// Its first half.
    fn input_grad(&mut self, which: usize) {
        let unit = self.next_backward(which);
        self.list.push(Instruction::InputGrad(unit));
        self.waiting.push_back(unit);
    }

    /// The second half of the unit that waits longest.
    fn weight_grad(&mut self) {
        let unit = self.waiting.pop_front();
        self.list.extend(unit.map(Instruction::WeightGrad));
    }

    /// The second half of the unit of one of the stages that waits longest.
    fn weight_grad_of(&mut self, which: usize) {
        let stage = self.stages[which];
        let place = self.waiting.iter().position(|unit| unit.stage == stage);
        let unit = place.and_then(|place| self.waiting.remove(place));
        self.list.extend(unit.map(Instruction::WeightGrad));
    }
}

/// ZBV (arXiv:2405.15362, section 4). It is made for 2p - 1 micro-batches or more: of fewer, it leaves out those that there are not.
fn zero_bubble_v(stages: &[usize], p: usize, rank: usize, m: usize) -> Vec<Instruction> {
    let made_for = m.max(2 * p - 1);
    let mut pair = Pair::of(stages);
    (0..2 * (p - rank) - 1).for_each(|_| pair.forward(0));
    for _ in 0..rank {
        pair.forward(1);
        pair.forward(0);
    }
    for _ in rank..p {
        pair.forward(1);
        pair.input_grad(1);
        pair.weight_grad();
    }
    while pair.forwards[1] < made_for {
        if pair.forwards[0] < made_for {
            pair.forward(0);
        }
        pair.input_grad(0);
        pair.weight_grad_of(0);
        pair.forward(1);
        pair.input_grad(1);
        pair.weight_grad_of(1);
    }
    for _ in 0..rank {
        pair.input_grad(0);
        pair.input_grad(1);
    }
    for _ in rank..p {
        pair.input_grad(0);
        pair.weight_grad_of(0);
    }
    for which in [1, 0] {
        for _ in 0..made_for {
            pair.weight_grad_of(which);
        }
    }
    pair.list
        .retain(|instruction| instruction.unit().micro_batch < m);
    pair.list
}

/// DualPipeV, in its eight phases. Where it has a forward pass beside a backward pass of the other stage, which some devices run at
/// the same time, these come one after the other.
fn dual_pipe_v(stages: &[usize], p: usize, rank: usize, m: usize) -> Vec<Instruction> {
    let after = p - 1 - rank;
    let mut pair = Pair::of(stages);
    (0..2 * after).for_each(|_| pair.forward(0));
    for _ in 0..=rank {
        pair.forward(0);
        pair.forward(1);
    }
    for _ in 0..after {
        pair.input_grad(1);
        pair.weight_grad();
        pair.forward(1);
    }
    for _ in 0..m + rank + 1 - 2 * p {
        pair.forward(0);
        pair.backward(1);
        pair.forward(1);
        pair.backward(0);
    }
    for _ in 0..after {
        pair.backward(1);
        pair.forward(1);
        pair.backward(0);
    }
    // From the middle of this phase on, weight gradients are put off for the next ones.
    for place in 0..2 * (rank + 1) {
        let which = (place + 1) % 2;
        match place <= rank {
            true => pair.backward(which),
            false => pair.input_grad(which),
        }
    }
    for _ in 0..after {
        pair.weight_grad();
        pair.input_grad(0);
    }
    (0..=rank).for_each(|_| pair.weight_grad());
    pair.list
}
