//! The data of a large collective on their way, chunk by chunk (see [`route`](super::route)).
//!
//! Every rank sends its contributions from copies of a chunk's size, so that the input may be part of memory that others
//! use. The owner of a chunk reduces straight into its output and sends from there; results of other owners are received
//! into their place and sent on from there, or, if the output is a tensor that others may use parts of, by way of such copies. Only
//! some chunks are under way at once, so that the copies are few and stay in the cache.
//!
//! All ranks take chunks in one order, and none that is under way waits for a later one, so the first that is left always moves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::Result;
use super::buffer::{Buffer, Pool};
use super::context::Context;
use super::group::{Kind, tag};
use super::in_flight::MpiInFlight;
use super::route::{Route, WINDOW_BYTES};
use super::step::{Gives, Lane, Source, Step};
use super::transfer::Transfer;
use crate::Error;
use crate::memory::bytes;
use crate::reduction::element::{Element, with_element};
use crate::reduction::pairwise::{Term, TermValues, reduce, reduce_blocks};

/// Chunks under way at once: contributions to one rank, and those that are gathered here.
const NUM_GATHERED: usize = 3;

/// Results under way at once, from or to one rank; contributions that other hosts have reduced, from or to all of them.
const NUM_RESULTS: usize = 6;

/// Of several hosts, as many as keep the ways between them busy: of the chunks that are gathered here, one in so many as there are
/// hosts waits for other hosts.
const MOST_WINDOWS: usize = 4;

/// The data of a collective on their way.
pub(super) struct Movement {
    in_flight: Arc<MpiInFlight>,
    seq: u64,
    dtype: DType,
    route: Route,
    /// What is left of the output when steps have taken their parts of it, if it is new: no bytes, but the vector comes from it.
    output: Option<Buffer>,
    lanes: BTreeMap<Lane, Queue>,
    pool: Pool,
    /// Steps that have yet to read the input.
    num_readers: usize,
}

/// The steps of a lane.
#[derive(Default)]
struct Queue {
    /// Those that have not begun.
    waiting: VecDeque<Step>,
    under_way: VecDeque<UnderWay>,
}

/// A step that has begun.
struct UnderWay {
    step: Step,
    received: Vec<(Source, Transfer<Buffer>)>,
    /// What it gave.
    given: Option<Arc<Buffer>>,
    sends: Vec<Transfer<Arc<Buffer>>>,
}

impl Movement {
    /// The movement of operation `seq`.
    pub fn new(
        mut route: Route,
        dtype: DType,
        seq: u64,
        in_flight: Arc<MpiInFlight>,
    ) -> Result<Self> {
        fn zeros<T: Element>(len: usize) -> Result<Buffer> {
            Ok(Buffer::new(T::zeros(len)))
        }
        let mut steps = std::mem::take(&mut route.steps);
        let mut movement = Self {
            in_flight,
            seq,
            dtype,
            output: None,
            lanes: BTreeMap::new(),
            pool: Pool::default(),
            num_readers: steps.iter().filter(|step| step.reads_input).count(),
            route,
        };
        if movement.in_flight.place().is_none() {
            let results = steps.iter_mut().filter(|step| step.gives == Gives::Result);
            let mut results: Vec<&mut Step> = results.collect();
            results.sort_by_key(|step| step.piece.destinations.first);
            let len = results.iter().map(|step| step.piece.len).sum();
            let mut output = with_element!(dtype, zeros(len))?;
            for step in results {
                step.room = Some(output.take(step.num_bytes)?);
            }
            movement.output = Some(output);
        }
        for step in steps {
            let queue = movement.lanes.entry(step.lane).or_default();
            queue.waiting.push_back(step);
        }
        Ok(movement)
    }

    /// Does what can be done; returns whether that was something.
    pub fn poll(&mut self, ctx: &Context) -> Result<bool> {
        let mut lanes = std::mem::take(&mut self.lanes);
        let mut moved = false;
        for (lane, queue) in &mut lanes {
            moved |= self.begin_some(ctx, *lane, queue)?;
            moved |= self.go_on(ctx, queue)?;
        }
        lanes.retain(|_, queue| !(queue.waiting.is_empty() && queue.under_way.is_empty()));
        self.lanes = lanes;
        Ok(moved)
    }

    /// Whether all of the output is there, and nothing under way.
    pub fn is_over(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Begins what the limits of a lane allow.
    fn begin_some(&mut self, ctx: &Context, lane: Lane, queue: &mut Queue) -> Result<bool> {
        let num_hosts = self.route.group.hosts.ranks.len();
        let (most_receiving, most_sending) = match lane {
            Lane::To(_) => (NUM_GATHERED, NUM_GATHERED),
            Lane::Gather => (NUM_GATHERED * num_hosts.min(MOST_WINDOWS), NUM_RESULTS),
            Lane::From(..) => (NUM_RESULTS, NUM_RESULTS),
            // From every other host.
            Lane::PassOn => (NUM_RESULTS.max(2 * num_hosts), NUM_RESULTS),
        };
        let mut moved = false;
        while let Some(step) = queue.waiting.front()
            && queue.num_sending(step.target_kind) < most_sending
            && let receiving = queue.under_way.iter().filter(|step| !step.is_sending())
            && receiving.clone().count() < most_receiving
            && receiving.map(UnderWay::num_bytes).sum::<usize>() < WINDOW_BYTES
            && let Some(step) = queue.waiting.pop_front()
        {
            let begun = self.begin(ctx, step)?;
            queue.under_way.push_back(begun);
            moved = true;
        }
        Ok(moved)
    }

    /// Starts to receive what a step needs.
    fn begin(&mut self, ctx: &Context, mut step: Step) -> Result<UnderWay> {
        let (group, tag) = (&self.route.group, tag(self.seq, step.source_kind));
        let mut received = Vec::with_capacity(step.sources.len());
        for source in &step.sources {
            let room = step.room.take_if(|_| !step.reads_input);
            let buffer = room.unwrap_or_else(|| self.pool.take(source.num_bytes));
            let transfer = Transfer::receive(&ctx.mpi, group, source.rank, tag, buffer)?;
            received.push((*source, transfer));
        }
        Ok(UnderWay {
            step,
            received,
            given: None,
            sends: Vec::new(),
        })
    }

    /// Goes on with what has begun.
    fn go_on(&mut self, ctx: &Context, queue: &mut Queue) -> Result<bool> {
        let mut moved = false;
        // What goes to one rank is sent in the order of the chunks. Results and blocks do not wait for each other: both ways between
        // two hosts are busy at once.
        let mut waits = [[false; 2]; 4];
        let mut index = 0;
        while let Some(under_way) = queue.under_way.get_mut(index) {
            let kind = under_way.step.target_kind as usize;
            let waits = &mut waits[kind][usize::from(under_way.is_sending())];
            *waits = *waits || !under_way.poll(ctx)?;
            if *waits {
                index += 1;
                continue;
            }
            moved = true;
            if !under_way.is_sending() {
                self.send(ctx, under_way)?;
            } else if let Some(over) = queue.under_way.remove(index)
                && let Some(given) = over.given.and_then(Arc::into_inner)
            {
                self.pool.give_back(given);
            }
        }
        Ok(moved)
    }

    /// Sends what a step gives, once all that it needs has come.
    fn send(&mut self, ctx: &Context, under_way: &mut UnderWay) -> Result<()> {
        let mut received = Vec::with_capacity(under_way.received.len());
        for (source, transfer) in std::mem::take(&mut under_way.received) {
            if let Some((buffer, got)) = transfer.take() {
                self.check_size(source, got)?;
                received.push((source, buffer));
            }
        }
        let step = &mut under_way.step;
        let given = match received.pop_if(|_| !step.reads_input) {
            Some((_, buffer)) => buffer,
            None => self.combine(step, received)?,
        };
        if step.gives == Gives::Result && self.output.is_none() {
            let first = step.piece.destinations.first;
            self.in_flight.write(first, &given)?;
        }
        let (given, tag) = (Arc::new(given), tag(self.seq, step.target_kind));
        for to in &step.targets {
            let send = Transfer::send(&ctx.mpi, &self.route.group, *to, tag, given.clone())?;
            under_way.sends.push(send);
        }
        under_way.given = Some(given);
        Ok(())
    }

    /// An error unless as many bytes came as should have.
    fn check_size(&self, source: Source, got: usize) -> Result<()> {
        let (call, from, expected) = (&self.in_flight.call, source.rank, source.num_bytes);
        if got == expected {
            return Ok(());
        }
        Err(Error::Backend(format!(
            "{call}: rank {from} of the group sent {got} bytes, expected {expected}\n\
             hint: all ranks must run the same version of the program"
        )))
    }

    /// Combines the input with what has come.
    fn combine(&mut self, step: &mut Step, received: Vec<(Source, Buffer)>) -> Result<Buffer> {
        let room = step.room.take();
        let mut given = room.unwrap_or_else(|| self.pool.take(step.num_bytes));
        let (in_flight, route) = (&self.in_flight, &self.route);
        with_element!(
            self.dtype,
            combine(in_flight, route, step, &received, &mut given)
        )?;
        for (_, buffer) in received {
            self.pool.give_back(buffer);
        }
        self.num_readers -= 1;
        if self.num_readers == 0 {
            self.in_flight.drop_input();
        }
        Ok(given)
    }

    /// What this rank gets; nothing if it has given up the place for it.
    pub fn take_output(&mut self) -> Result<Vec<Tensor>> {
        fn tensor<T: Element>(output: Buffer, dims: &[usize]) -> Result<Tensor> {
            let values = output.into_vec::<T>().unwrap_or_default();
            Ok(Tensor::from_vec(values, dims, &Device::Cpu)?)
        }
        let Some(output) = self.output.take() else {
            return Ok(self.in_flight.place().into_iter().collect());
        };
        let dims = self.in_flight.call.output_dims(self.route.group.rank);
        Ok(vec![with_element!(self.dtype, tensor(output, &dims))?])
    }
}

impl Queue {
    fn num_sending(&self, kind: Kind) -> usize {
        let sending = self.under_way.iter().filter(|step| step.is_sending());
        sending.filter(|sent| sent.step.target_kind == kind).count()
    }
}

impl UnderWay {
    /// Whether all that it needs has come.
    fn is_sending(&self) -> bool {
        self.given.is_some()
    }

    /// Bytes of the messages that it waits for, or has.
    fn num_bytes(&self) -> usize {
        let transfers = self.received.iter();
        transfers.map(|(source, _)| source.num_bytes).sum()
    }

    /// Whether all its messages have come, or gone.
    fn poll(&mut self, ctx: &Context) -> Result<bool> {
        for (_, transfer) in &mut self.received {
            if !transfer.poll(&ctx.mpi)? {
                return Ok(false);
            }
        }
        while let Some(send) = self.sends.last_mut() {
            if !send.poll(&ctx.mpi)? {
                return Ok(false);
            }
            self.sends.pop();
        }
        Ok(true)
    }
}

/// Combines the input of `in_flight` with what has come, [pairwise](crate::reduction::pairwise).
fn combine<T: Element>(
    in_flight: &MpiInFlight,
    route: &Route,
    step: &Step,
    received: &[(Source, Buffer)],
    given: &mut [u8],
) -> Result<()> {
    let (len, first) = (step.piece.len, step.piece.sources.first);
    let group = &route.group;
    in_flight.read(first, len, |input: &[T]| {
        let mut terms = vec![Term::input(group.rank, input)];
        for (source, buffer) in received {
            let Some(host) = source.host else {
                terms.push(Term::input(source.rank, bytes::elements(buffer)));
                continue;
            };
            let blocks = bytes::elements(buffer).chunks(len);
            let blocks = group.hosts.blocks[host].iter().zip(blocks);
            terms.extend(blocks.map(|(ranks, values)| Term {
                ranks: ranks.clone(),
                values: TermValues::Combined(values),
            }));
        }
        terms.sort_by_key(|term| term.ranks.start);
        match step.gives {
            Gives::Blocks => {
                let (world_size, blocks) = (group.members.len(), bytes::elements_mut(given));
                reduce_blocks(route.op, &terms, world_size, len, blocks);
            }
            Gives::Copy | Gives::Result => {
                reduce(route.op, &terms, &mut [bytes::elements_mut(given)]);
            }
        }
    })
}
