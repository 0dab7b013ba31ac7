//! How long the ranks of a pipeline work and wait in a step, from the times of what they do.

use std::collections::{HashMap, VecDeque};

use candle_core::Result;

use super::{Action, Item, Program};
use crate::params::ParamLayout;
use crate::pipeline_layout::PipelineLayout;
use crate::schedule::{Instruction, Message, Plan, Simulation, Timed, Times, Unit};

/// The lists of a rank's step, with the times of all actions that are no pass of a block.
pub(crate) struct TimedRank<'a> {
    pub lists: Vec<Program>,
    pub seconds: Box<dyn Fn(Action) -> f64 + 'a>,
    /// The bucket of each part of the optimizer's state.
    pub bucket_of_part: Vec<usize>,
    /// The buckets of the rank's parameters; `None` for the passes of a schedule alone.
    pub layout: Option<&'a ParamLayout>,
}

/// Queues beside the passes, each of which does one thing after another: the ranks that divide weights and gradients, those that divide a second copy, and
/// the way to where values are kept away.
#[derive(Clone, Copy)]
enum Queue {
    Shard,
    Copy,
    Offload,
}

/// Values that an action has started and a later one waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Awaited {
    Weights(u32),
    Item(Item),
}

/// A rank on its way through the step.
struct Clock<'a> {
    rank: &'a TimedRank<'a>,
    now: f64,
    /// When each queue is done with what it was given.
    queues: [f64; 3],
    /// When what was started is over.
    over: HashMap<Awaited, f64>,
    /// The sums under way: of each a bucket, and when it is over.
    reducing: Vec<(u32, f64)>,
    /// Updated weights on their way: the first block that uses them, and when they are here.
    spreading: VecDeque<(usize, f64)>,
    /// The list and the phase in it that come next.
    next: (usize, usize),
    timed: Vec<Timed>,
    passes_end: f64,
}

impl Clock<'_> {
    fn start(&mut self, queue: Queue, action: Action) -> f64 {
        let free = &mut self.queues[queue as usize];
        *free = free.max(self.now) + (self.rank.seconds)(action);
        *free
    }

    fn wait(&mut self, until: f64) {
        self.now = self.now.max(until);
    }

    fn wait_for(&mut self, what: Awaited) {
        let over = self.over.remove(&what).unwrap_or(0.0);
        self.wait(over);
    }

    /// Waits until at most `num` buckets of updated weights are on their way, but for those that a later block is the first to use.
    fn wait_for_weights(&mut self, num: usize, block: usize) {
        while self.spreading.len() > num
            && let Some((_, over)) = self.spreading.pop_front_if(|(first, _)| *first <= block)
        {
            self.wait(over);
        }
    }

    /// An action; a pass of a block takes `pass_secs`.
    fn act(&mut self, action: Action, pass_secs: f64) {
        match action {
            Action::Forward(_)
            | Action::Infer(_)
            | Action::Backward(_)
            | Action::InputGrad(_)
            | Action::WeightGrad(_) => {
                // Sums are fetched right before they are written to.
                let items: Vec<Awaited> = self.over.keys().copied().collect();
                let is_sum = |what: &Awaited| matches!(what, Awaited::Item(Item::Sum(_)));
                items
                    .into_iter()
                    .filter(is_sum)
                    .for_each(|what| self.wait_for(what));
                self.now += pass_secs;
            }
            Action::AwaitBlock(block) => self.wait_for_weights(0, block as usize),
            Action::AwaitAllBut(num) => self.wait_for_weights(num as usize, usize::MAX),
            Action::Gather(bucket) | Action::GatherCopy(bucket) => {
                self.wait_for(Awaited::Item(Item::Weights(bucket)));
                let is_whole = action == Action::Gather(bucket);
                let queue = if is_whole { Queue::Shard } else { Queue::Copy };
                let over = self.start(queue, action);
                self.over.insert(Awaited::Weights(bucket), over);
            }
            Action::Arrive(bucket) | Action::ArriveAndCopy(bucket) => {
                self.wait_for(Awaited::Item(Item::Weights(bucket)));
                self.wait_for(Awaited::Weights(bucket));
            }
            Action::Reduce(bucket) => {
                let over = self.start(Queue::Shard, action);
                self.reducing.push((bucket, over));
            }
            Action::AddReduced(bucket) => {
                self.wait_for(Awaited::Item(Item::Sum(bucket)));
                let place = self.reducing.iter().position(|(of, _)| *of == bucket);
                let over = place.map(|place| self.reducing.remove(place));
                self.wait(over.map_or(0.0, |(_, over)| over));
            }
            Action::Settle(bucket) => {
                self.wait_for(Awaited::Item(Item::Sum(bucket)));
                let layout = self.rank.layout;
                let is_its = |(sum, _): &mut (u32, f64)| {
                    layout.is_some_and(|it| it.bucket_of_sum(*sum as usize) == bucket as usize)
                };
                let own = self.reducing.extract_if(.., is_its);
                let over = own.map(|(_, over)| over).fold(0.0, f64::max);
                self.wait(over);
                self.now += (self.rank.seconds)(action);
            }
            Action::Fetch(item) => {
                let over = self.start(Queue::Offload, action);
                self.over.insert(Awaited::Item(item), over);
            }
            Action::Put(_) => {
                self.start(Queue::Offload, action);
            }
            Action::FlushSums | Action::FlushUpdates => {
                self.wait(self.queues[Queue::Offload as usize])
            }
            Action::Update(part) => {
                let bucket = self.rank.bucket_of_part[part as usize] as u32;
                for item in [Item::Sum(bucket), Item::Weights(bucket), Item::State(part)] {
                    self.wait_for(Awaited::Item(item));
                }
                self.now += (self.rank.seconds)(action);
            }
            Action::Spread(bucket) => {
                let over = self.start(Queue::Shard, action);
                let layout = self.rank.layout;
                let first = layout.map_or(0, |layout| layout.bucket(bucket as usize).block);
                self.spreading.push_back((first, over));
            }
            Action::Square(_) | Action::Norm => self.now += (self.rank.seconds)(action),
            Action::Free(_) | Action::FreeAll | Action::MakeGradients(_) | Action::Drop(_) => {}
        }
    }

    /// Goes on until something is needed that is not here; whether it came to do anything. `here` are the times at which what units need is on their rank.
    fn go_on(
        &mut self,
        layout: &PipelineLayout,
        times: &Times,
        here: &mut HashMap<(Unit, Message), f64>,
    ) -> bool {
        let before = self.next;
        while let Some(list) = self.rank.lists.get(self.next.0) {
            let Some((instruction, actions)) = list.phase(self.next.1) else {
                self.next = (self.next.0 + 1, 0);
                continue;
            };
            if let Some(instruction) = instruction {
                let unit = instruction.unit();
                let needs = instruction
                    .input()
                    .filter(|&what| !Plan::is_end(layout, unit, what));
                match needs.map(|what| here.get(&(unit, what))) {
                    None => {}
                    Some(Some(at)) => self.wait(*at),
                    Some(None) => break,
                }
                self.instruction(instruction, actions, times);
                if let Some(what) = instruction.input()
                    && let Some(to) = Plan::receiver(layout, unit, what)
                {
                    let is_near = layout.rank_of(to.stage) == layout.rank_of(unit.stage);
                    here.insert((to, what), self.now + if is_near { 0.0 } else { times.hop });
                }
            } else {
                actions.iter().for_each(|action| self.act(*action, 0.0));
            }
            self.next.1 += 1;
        }
        self.next != before
    }

    fn instruction(&mut self, instruction: Instruction, actions: &[Action], times: &Times) {
        let (start, busy) = (self.now, times.of(instruction));
        let num_passes = actions.iter().filter(|action| action.is_pass()).count();
        // A stage that is frozen has no backward pass.
        let busy = if self.rank.layout.is_some() && num_passes == 0 {
            0.0
        } else {
            busy
        };
        match num_passes {
            0 => self.now += busy,
            num => actions
                .iter()
                .for_each(|action| self.act(*action, busy / num as f64)),
        }
        self.timed.push(Timed {
            instruction,
            start,
            end: self.now,
            busy,
        });
        self.passes_end = self.now;
    }
}

/// The last of `num_steps` steps that ranks of a pipeline make one after another.
pub(crate) fn simulate(
    layout: &PipelineLayout,
    times: &Times,
    ranks: &[TimedRank<'_>],
    num_steps: usize,
) -> Simulation {
    let clock = |rank| Clock {
        rank,
        now: 0.0,
        queues: [0.0; 3],
        over: HashMap::new(),
        reducing: Vec::new(),
        spreading: VecDeque::new(),
        next: (0, 0),
        timed: Vec::new(),
        passes_end: 0.0,
    };
    let mut clocks: Vec<Clock<'_>> = ranks.iter().map(clock).collect();
    let mut start = 0.0;
    for _ in 0..num_steps {
        start = clocks.iter().map(|clock| clock.now).fold(0.0, f64::max);
        for clock in &mut clocks {
            // The norm of the step before is of all ranks.
            clock.now = start;
            (clock.next, clock.passes_end) = ((0, 0), start);
            clock.timed.clear();
        }
        let mut here = HashMap::new();
        while clocks
            .iter_mut()
            .any(|clock| clock.go_on(layout, times, &mut here))
        {}
    }
    let since = |at: f64| at - start;
    let ends = |end: fn(&Clock<'_>) -> f64| since(clocks.iter().map(end).fold(start, f64::max));
    let ranks = clocks.iter().map(|clock| {
        let timed = clock.timed.iter().map(|timed| Timed {
            start: since(timed.start),
            end: since(timed.end),
            ..*timed
        });
        timed.collect()
    });
    Simulation {
        passes: ends(|clock| clock.passes_end),
        makespan: ends(|clock| clock.now),
        ranks: ranks.collect(),
    }
}

impl Plan {
    /// The step with these times, where each rank begins an instruction as soon as it is free and has what it needs.
    ///
    /// # Errors
    /// Times of another number of stages, or times that are no numbers of 0 or more.
    pub fn simulate(&self, times: &Times) -> Result<Simulation> {
        times.check(self.layout())?;
        let ranks = self.ranks().iter().map(|list| TimedRank {
            lists: vec![Program::of_passes(list)],
            seconds: Box::new(|_| 0.0),
            bucket_of_part: Vec::new(),
            layout: None,
        });
        let ranks: Vec<_> = ranks.collect();
        Ok(simulate(self.layout(), times, &ranks, 1))
    }
}
