//! The lists of all ranks together: whether they fit each other, and the messages that follow from them.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::{Hash, Hasher};

use candle_core::{Result, bail};
use twox_hash::XxHash64;

use super::{Instruction, Instructions, Message, Unit};
use crate::pass::Early;
use crate::pipeline_layout::PipelineLayout;

/// What each rank of a pipeline computes in a step, seen to be whole and to come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    layout: PipelineLayout,
    num_micro_batches: usize,
    ranks: Vec<Vec<Instruction>>,
    keeps_order: bool,
    holds_little: bool,
}

/// Units of a step, at most: lists of more are a slip of the keyboard, and take all memory.
const MAX_UNITS: usize = 1 << 21;

/// What an end of a channel was asked to do: to send or to receive what a unit needs.
#[derive(Clone, Copy)]
struct Posted {
    unit: Unit,
    what: Message,
    is_recv: bool,
}

impl Posted {
    /// The send or receive that an instruction posts, if it does.
    fn by(instruction: Instruction, layout: &PipelineLayout) -> Option<Self> {
        let (unit, what, is_recv) = match instruction {
            Instruction::Send(unit, what) => (Plan::receiver(layout, unit, what)?, what, false),
            Instruction::Recv(unit, what) => (unit, what, true),
            _ => return None,
        };
        Some(Self {
            unit,
            what,
            is_recv,
        })
    }
}

/// Where a message goes: the ranks of the pipeline that send and receive it, and what it is.
pub(crate) type Link = (usize, usize, Message);

impl Plan {
    /// The lists that `schedule` gives for `num_micro_batches` on the ranks of `layout`.
    ///
    /// # Errors
    /// What `schedule` returns, and as for [`Self::of_lists`].
    pub fn new(
        schedule: &dyn Instructions,
        layout: &PipelineLayout,
        num_micro_batches: usize,
    ) -> Result<Self> {
        if layout.num_stages().saturating_mul(num_micro_batches) > MAX_UNITS {
            bail!(
                "{num_micro_batches} micro-batches in each of {} stages; expected {MAX_UNITS} or fewer together",
                layout.num_stages()
            );
        }
        let ranks = 0..layout.num_ranks();
        let ranks = ranks.map(|rank| schedule.of_rank(layout, rank, num_micro_batches));
        let plan = Self::of_lists(layout, num_micro_batches, ranks.collect::<Result<_>>()?)?;
        Ok(Self {
            holds_little: schedule.holds_little(),
            ..plan
        })
    }

    /// What each rank computes, in the order of the ranks.
    ///
    /// # Errors
    /// A unit of a rank without a forward pass and after it a backward pass, whole or in its two halves, or with more than that; units of other
    /// ranks; ranks that need messages in another order than they are sent, or would wait for each other for ever.
    pub fn of_lists(
        layout: &PipelineLayout,
        num_micro_batches: usize,
        ranks: Vec<Vec<Instruction>>,
    ) -> Result<Self> {
        let mut plan = Self {
            layout: layout.clone(),
            num_micro_batches,
            ranks,
            keeps_order: true,
            holds_little: false,
        };
        if plan.ranks.len() != layout.num_ranks() {
            bail!(
                "a schedule with lists for {} ranks; expected {}, on which the stages lie",
                plan.ranks.len(),
                layout.num_ranks()
            );
        }
        for rank in 0..plan.ranks.len() {
            plan.check_rank(rank)?;
        }
        plan.keeps_order = plan.ranks.iter().all(|list| is_in_order(list));
        plan.check_order_of_messages()?;
        plan.check_ends(1, |link| link)?;
        Ok(plan)
    }

    /// Forward passes alone, of an evaluation or of a text that is generated: each stage's micro-batches one after the other.
    pub fn forwards(layout: &PipelineLayout, num_micro_batches: usize) -> Self {
        let of_rank = |rank| {
            let stages = layout.stages_of(rank);
            let units = stages.flat_map(|stage| {
                (0..num_micro_batches).map(move |micro_batch| Unit { stage, micro_batch })
            });
            units.map(Instruction::Forward).collect()
        };
        Self {
            layout: layout.clone(),
            num_micro_batches,
            ranks: (0..layout.num_ranks()).map(of_rank).collect(),
            keeps_order: true,
            holds_little: false,
        }
    }

    /// The stages, and which rank has which.
    pub fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    /// A hash of the lists of all ranks.
    pub(crate) fn condensed(&self) -> u64 {
        let mut hasher = XxHash64::default();
        (&self.ranks, self.holds_little).hash(&mut hasher);
        hasher.finish()
    }

    /// Micro-batches of the step.
    pub fn num_micro_batches(&self) -> usize {
        self.num_micro_batches
    }

    /// What each rank computes.
    pub fn ranks(&self) -> &[Vec<Instruction>] {
        &self.ranks
    }

    /// Which gradients of weights an input half computes. Where input halves come in another order than weight halves, gradients would be
    /// added in another order, too; replicas that add them up after each micro-batch, as those do that divide them, would have those of later ones among them.
    /// And sums that are away would come for each half. So of such gradients, which `come_once`, none is early.
    pub(crate) fn early(&self, come_once: bool) -> Early {
        let is_early = self.keeps_order && !come_once;
        Early {
            finished: is_early,
            large: is_early && self.holds_little,
        }
    }

    /// The most units whose activations a rank holds at once: from the forward pass to the end of the backward pass, in
    /// micro-batches of one of its stages.
    pub fn peak(&self, rank: usize) -> usize {
        self.peak_of(rank, |_| 1)
    }

    /// The most that a rank holds at once of what each of its stages holds for a micro-batch.
    pub fn peak_of(&self, rank: usize, of_stage: impl Fn(usize) -> usize) -> usize {
        let (mut held, mut peak) = (0, 0);
        for instruction in &self.ranks[rank] {
            let of_stage = of_stage(instruction.unit().stage);
            match instruction {
                Instruction::Forward(_) => held += of_stage,
                Instruction::Backward(_) | Instruction::WeightGrad(_) => held -= of_stage,
                _ => {}
            }
            peak = peak.max(held);
        }
        peak
    }

    /// The stage that gives a unit its input, or the gradient of its output.
    fn giver(layout: &PipelineLayout, unit: Unit, what: Message) -> Option<usize> {
        match what {
            Message::Activation => unit.stage.checked_sub(1),
            Message::Gradient => Some(unit.stage + 1).filter(|&next| next < layout.num_stages()),
        }
    }

    /// The rank of that stage, if it is another one.
    pub(crate) fn source(layout: &PipelineLayout, unit: Unit, what: Message) -> Option<usize> {
        let rank = layout.rank_of(Self::giver(layout, unit, what)?);
        (rank != layout.rank_of(unit.stage)).then_some(rank)
    }

    /// The unit that needs what `unit` gives, if there is one.
    pub(crate) fn receiver(layout: &PipelineLayout, unit: Unit, what: Message) -> Option<Unit> {
        let back = match what {
            Message::Activation => Message::Gradient,
            Message::Gradient => Message::Activation,
        };
        let stage = Self::giver(layout, unit, back)?;
        Some(Unit { stage, ..unit })
    }

    /// What a rank does, with messages: what a unit gives to another rank is sent when it is there, and what it needs is asked for before, so
    /// that up to `ahead` receives are posted beside that of the unit which is next. An input half and a weight half that follow each other are one
    /// backward pass, unless another rank waits for what the first one gives.
    pub fn with_messages(&self, rank: usize, ahead: usize) -> Vec<Instruction> {
        let layout = &self.layout;
        let list = self.joined(rank);
        let recvs = list.iter().filter_map(|instruction| {
            let what = instruction.input()?;
            Self::source(layout, instruction.unit(), what)?;
            Some(Instruction::Recv(instruction.unit(), what))
        });
        let mut recvs: VecDeque<Instruction> = recvs.collect();
        let mut with_messages = Vec::with_capacity(2 * list.len());
        // Receives that were posted and not yet waited for.
        let mut num_posted = 0;
        for instruction in list {
            let unit = instruction.unit();
            let needs = instruction.input();
            let needs = needs.filter(|&what| Self::source(layout, unit, what).is_some());
            let num_wanted = ahead.saturating_add(usize::from(needs.is_some()));
            while num_posted < num_wanted
                && let Some(recv) = recvs.pop_front()
            {
                with_messages.push(recv);
                num_posted += 1;
            }
            num_posted -= usize::from(needs.is_some());
            with_messages.push(instruction);
            // What a forward pass is given is what the forward pass after it is given: the same kind of message.
            if let Some(what) = instruction.input()
                && let Some(to) = Self::receiver(layout, unit, what)
                && layout.rank_of(to.stage) != rank
            {
                with_messages.push(Instruction::Send(unit, what));
            }
        }
        with_messages
    }

    /// A rank's list with halves that follow each other as one, unless another rank waits for what the first one gives.
    pub(crate) fn joined(&self, rank: usize) -> Vec<Instruction> {
        let layout = &self.layout;
        let mut joined: Vec<Instruction> = Vec::with_capacity(self.ranks[rank].len());
        for &instruction in &self.ranks[rank] {
            let unit = instruction.unit();
            let to = Self::receiver(layout, unit, Message::Gradient);
            let is_awaited = to.is_some_and(|to| layout.rank_of(to.stage) != rank);
            match (joined.last_mut(), instruction) {
                (Some(last @ Instruction::InputGrad(_)), Instruction::WeightGrad(_))
                    if last.unit() == unit && !is_awaited =>
                {
                    *last = Instruction::Backward(unit);
                }
                _ => joined.push(instruction),
            }
        }
        joined
    }

    /// An error unless a rank's list is whole.
    fn check_rank(&self, rank: usize) -> Result<()> {
        let own: Vec<usize> = self.layout.stages_of(rank).collect();
        let m = self.num_micro_batches;
        let mut last: HashMap<Unit, Instruction> = HashMap::new();
        for &instruction in &self.ranks[rank] {
            let unit = instruction.unit();
            let before = last.insert(unit, instruction);
            let is_own =
                unit.stage < self.layout.num_stages() && self.layout.rank_of(unit.stage) == rank;
            if !is_own {
                bail!(
                    "the schedule has the {instruction} on rank {rank} of the pipeline; expected units of its stages, {own:?}"
                );
            }
            if unit.micro_batch >= m {
                bail!(
                    "the schedule has the {instruction} on rank {rank} of the pipeline; expected micro-batches below {m}"
                );
            }
            let is_in_order = matches!(
                (before, instruction),
                (None, Instruction::Forward(_))
                    | (
                        Some(Instruction::Forward(_)),
                        Instruction::Backward(_) | Instruction::InputGrad(_)
                    )
                    | (Some(Instruction::InputGrad(_)), Instruction::WeightGrad(_))
            );
            if !is_in_order {
                let before = match before {
                    Some(before) => format!("after the {before}"),
                    None => "before its forward pass".to_string(),
                };
                bail!(
                    "the schedule has the {instruction} on rank {rank} of the pipeline {before}; expected a forward pass and then a backward \
                     pass of each unit, or its input gradient and then its weight gradient, each once"
                );
            }
        }
        for unit in own
            .iter()
            .flat_map(|&stage| (0..m).map(move |micro_batch| Unit { stage, micro_batch }))
        {
            let missing = match last.get(&unit) {
                Some(Instruction::Backward(_) | Instruction::WeightGrad(_)) => continue,
                Some(Instruction::InputGrad(_)) => Instruction::WeightGrad(unit),
                Some(_) => Instruction::Backward(unit),
                None => Instruction::Forward(unit),
            };
            bail!(
                "the schedule does not have the {missing} on rank {rank} of the pipeline, where it belongs"
            );
        }
        Ok(())
    }

    /// An error if between two ranks what is sent over a link is needed in another order.
    fn check_order_of_messages(&self) -> Result<()> {
        let layout = &self.layout;
        for (from, to, what) in links(layout) {
            let is_such = |instruction: &&Instruction| instruction.input() == Some(what);
            let units = |rank: usize| {
                let list = self.ranks[rank].iter();
                list.filter(is_such).map(|instruction| instruction.unit())
            };
            let sent = units(from).filter_map(|unit| Self::receiver(layout, unit, what));
            let sent = sent.filter(|unit| layout.rank_of(unit.stage) == to);
            let needed = units(to).filter(|&unit| Self::source(layout, unit, what) == Some(from));
            let mut pairs = sent.zip(needed);
            if let Some((sent, needed)) = pairs.find(|(sent, needed)| sent != needed) {
                let what = match what {
                    Message::Activation => "the input",
                    Message::Gradient => "the gradient",
                };
                bail!(
                    "the schedule has rank {from} of the pipeline send to rank {to} in another order than this one needs it: {what} of {sent}, \
                     where it needs that of {needed} first"
                );
            }
        }
        Ok(())
    }

    /// An error if ranks would wait for each other for ever, where the channels between two ranks are FIFO queues in which a send waits until
    /// its receive is posted, and whatever is behind it waits too, as in NCCL: with up to `ahead` receives posted ahead, over the
    /// channels that `channel_of` says. Links of one name share a channel; each on its own is free of waiting, two in one are not
    /// for every schedule.
    ///
    /// # Errors
    /// The ranks that wait, and for what.
    pub fn check_ends<C: Eq + std::hash::Hash>(
        &self,
        ahead: usize,
        channel_of: impl Fn((usize, usize, Message)) -> C,
    ) -> Result<()> {
        let (layout, num_ranks) = (&self.layout, self.ranks.len());
        let links = links(layout);
        let lists: Vec<_> = (0..num_ranks)
            .map(|rank| self.with_messages(rank, ahead))
            .collect();
        let mut next = vec![0; num_ranks];
        // Sends and receives by the end of a channel, in the order in which it was asked.
        let mut queues: HashMap<(usize, C), VecDeque<Posted>> = HashMap::new();
        let mut here: HashSet<(Unit, Message)> = HashSet::new();
        loop {
            let mut has_moved = false;
            for (rank, list) in lists.iter().enumerate() {
                while let Some(&instruction) = list.get(next[rank]) {
                    let unit = instruction.unit();
                    if let Some(asked) = Posted::by(instruction, layout) {
                        let to = layout.rank_of(asked.unit.stage);
                        let from = Self::source(layout, asked.unit, asked.what).unwrap_or(to);
                        let channel = channel_of((from, to, asked.what));
                        queues.entry((rank, channel)).or_default().push_back(asked);
                    }
                    let needs = instruction.input().map(|what| (unit, what));
                    if needs
                        .is_some_and(|it| !Self::is_end(layout, it.0, it.1) && !here.contains(&it))
                    {
                        break;
                    }
                    // What a stage gives to another one of its rank needs no channel.
                    if let Some(what) = instruction.input()
                        && let Some(to) = Self::receiver(layout, unit, what)
                        && layout.rank_of(to.stage) == rank
                    {
                        here.insert((to, what));
                    }
                    next[rank] += 1;
                    has_moved = true;
                }
            }
            for &link in &links {
                let ends = [link.0, link.1].map(|rank| (rank, channel_of(link)));
                loop {
                    let [sent, wanted] = [0, 1].map(|end| queues.get(&ends[end])?.front().copied());
                    let (Some(sent), Some(wanted)) = (sent, wanted) else {
                        break;
                    };
                    let is_for_it = (sent.unit, sent.what) == (wanted.unit, wanted.what);
                    if sent.is_recv || !wanted.is_recv || !is_for_it {
                        break;
                    }
                    for end in &ends {
                        queues.get_mut(end).map(VecDeque::pop_front);
                    }
                    here.insert((wanted.unit, wanted.what));
                    has_moved = true;
                }
            }
            if !has_moved {
                break;
            }
        }
        let waiting = (0..num_ranks).filter_map(|rank| {
            let instruction = lists[rank].get(next[rank])?;
            Some(format!("rank {rank} before the {instruction}"))
        });
        let waiting: Vec<String> = waiting.take(4).collect();
        if !waiting.is_empty() {
            bail!(
                "the schedule does not come to its end: ranks of the pipeline wait for what nobody gives them, {}",
                waiting.join(", ")
            );
        }
        Ok(())
    }

    /// Whether a unit needs nothing of that kind, as it is at the model's beginning or end.
    pub(crate) fn is_end(layout: &PipelineLayout, unit: Unit, what: Message) -> bool {
        Self::giver(layout, unit, what).is_none()
    }
}

/// Whether backward passes of each stage come in the order of the micro-batches.
fn is_in_order(list: &[Instruction]) -> bool {
    let mut next = HashMap::new();
    let backward = list.iter().filter_map(|instruction| match instruction {
        Instruction::Backward(unit) | Instruction::InputGrad(unit) => Some(*unit),
        _ => None,
    });
    backward.into_iter().all(|Unit { stage, micro_batch }| {
        let next = next.entry(stage).or_insert(0);
        *next += 1;
        micro_batch + 1 == *next
    })
}

/// The ways on which messages go between ranks.
pub(crate) fn links(layout: &PipelineLayout) -> BTreeSet<Link> {
    let ranks = layout.ranks();
    let ends = ranks.windows(2).filter(|ends| ends[0] != ends[1]);
    let links = ends.flat_map(|ends| {
        [
            (ends[0], ends[1], Message::Activation),
            (ends[1], ends[0], Message::Gradient),
        ]
    });
    links.collect()
}
