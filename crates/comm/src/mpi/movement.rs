//! The data of a large collective on their way, in [chunks](super::chunk).
//!
//! MPI works on copies of a chunk's size, as the input may be part of memory that others use, and so may the output, unless it is new. Only
//! some chunks are under way at once, so that the copies are few and stay in the cache.
//!
//! All ranks take chunks in one order, and none that is under way waits for a later one, so the first that is left always moves.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::Result;
use super::buffer::{Buffer, Pool};
use super::chunk::{Chunk, NUM_ROUNDS, Part, chunks};
use super::context::Context;
use super::group::{Group, Kind, tag};
use super::in_flight::InFlight;
use super::transfer::Transfer;
use crate::element::{self, Element, with_element};
use crate::pairwise::{Term, Values, reduce, reduce_block};
use crate::{Error, ReduceOp, bytes};

/// The data of a collective on their way.
pub(super) struct Movement {
    in_flight: Arc<InFlight>,
    group: Arc<Group>,
    seq: u64,
    dtype: DType,
    /// The shape of the output.
    dims: Vec<usize>,
    /// What is left of the output when chunks have taken their rooms, if it is new: no bytes, but the vector comes from it.
    output: Option<Buffer>,
    /// Chunks that have not begun, with the rooms for their results if the output is new.
    waiting: VecDeque<(Chunk, Option<Buffer>)>,
    under_way: VecDeque<UnderWay>,
    pool: Pool,
    /// Chunks that have yet to read the input.
    num_readers: usize,
}

/// A chunk that has begun.
struct UnderWay {
    chunk: Chunk,
    part: Part,
    stage: Stage,
    /// By the rank that each is from.
    inputs: Vec<(usize, Transfer<Buffer>)>,
    result: Option<Transfer<Buffer>>,
    /// For the result, unless it is received.
    room: Option<Buffer>,
    sends: Vec<Transfer<Arc<Buffer>>>,
}

/// What a chunk waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Inputs,
    Result,
    Sends,
}

impl Movement {
    /// The movement of operation `seq` of the group.
    pub fn new(group: Arc<Group>, seq: u64, in_flight: Arc<InFlight>) -> Result<Self> {
        let ((dtype, shape), operation) = (&in_flight.call.kinds[0], &in_flight.call.operation);
        let bytes = dtype.size_in_bytes();
        let widening = element::accumulated(*dtype).size_in_bytes() / bytes;
        let chunks = chunks(operation, shape, &group, (bytes, widening));
        let reads_input = |chunk: &&Chunk| chunk.piece.sources.has(group.rank);
        let mut movement = Self {
            dtype: *dtype,
            dims: operation.output_dims(shape, group.members.len()),
            output: None,
            seq,
            num_readers: chunks.iter().filter(reads_input).count(),
            waiting: chunks.into_iter().map(|chunk| (chunk, None)).collect(),
            under_way: VecDeque::new(),
            pool: Pool::default(),
            group,
            in_flight: in_flight.clone(),
        };
        if in_flight.place().is_none() {
            movement.make_output()?;
        }
        Ok(movement)
    }

    /// Makes a new output, and gives each chunk its part.
    fn make_output(&mut self) -> Result<()> {
        fn zeros<T: Element>(len: usize) -> Result<Buffer> {
            Ok(Buffer::new(T::zeros(len)))
        }
        let mut output = with_element!(self.dtype, zeros(self.dims.iter().product()))?;
        let chunks = self.waiting.iter_mut();
        let results = chunks.filter(|(chunk, _)| chunk.piece.destinations.has(self.group.rank));
        let mut results: Vec<_> = results.collect();
        results.sort_by_key(|(chunk, _)| chunk.piece.destinations.first);
        for (chunk, room) in results {
            *room = Some(output.take(chunk.piece.len * self.dtype.size_in_bytes())?);
        }
        self.output = Some(output);
        Ok(())
    }

    /// Does what can be done; returns whether that was something.
    pub fn poll(&mut self, ctx: &Context) -> Result<bool> {
        let mut moved = false;
        let begun = self.under_way.front().map(|oldest| &oldest.chunk);
        let oldest = begun.or(self.waiting.front().map(|(next, _)| next));
        let oldest = oldest.map_or(0, |oldest| oldest.round);
        while let Some((next, _)) = self.waiting.front()
            && next.round < oldest + NUM_ROUNDS
            && let Some((next, room)) = self.waiting.pop_front()
        {
            let begun = self.begin(ctx, next, room)?;
            self.under_way.push_back(begun);
            moved = true;
        }
        // What goes to one rank is sent in the order of the chunks.
        let mut waits = [false; Kind::NUM];
        for mut chunk in std::mem::take(&mut self.under_way) {
            moved |= self.go_on(ctx, &mut chunk, &mut waits)?;
            match chunk.is_over() {
                true => moved = true,
                false => self.under_way.push_back(chunk),
            }
        }
        Ok(moved)
    }

    /// Whether all of the output is there, and nothing under way.
    pub fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.under_way.is_empty()
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
        Ok(vec![with_element!(self.dtype, tensor(output, &self.dims))?])
    }

    /// Starts to receive what this rank needs for a chunk.
    fn begin(&mut self, ctx: &Context, chunk: Chunk, mut room: Option<Buffer>) -> Result<UnderWay> {
        let part = chunk.part(&self.group);
        let (pool, group) = (&mut self.pool, &self.group);
        let mut receive = |from, kind, num_bytes, room: Option<Buffer>| {
            let room = room.unwrap_or_else(|| pool.take(num_bytes));
            Transfer::receive(&ctx.mpi, group, from, tag(self.seq, kind), room)
        };
        let mut inputs = Vec::with_capacity(part.inputs_from.len());
        for from in &part.inputs_from {
            let num_bytes = input_bytes(self.dtype, group, &chunk, *from);
            let room = room.take_if(|_| !chunk.piece.sources.has(group.rank));
            inputs.push((*from, receive(*from, Kind::Input, num_bytes, room)?));
        }
        let result = part.result_from.map(|from| {
            let num_bytes = chunk.piece.len * self.dtype.size_in_bytes();
            let kind = Kind::of_result(from == chunk.owner);
            receive(from, kind, num_bytes, room.take())
        });
        Ok(UnderWay {
            stage: match part.gathers {
                true => Stage::Inputs,
                false => Stage::Result,
            },
            result: result.transpose()?,
            room,
            chunk,
            part,
            inputs,
            sends: Vec::new(),
        })
    }

    /// Goes on with a chunk, unless an earlier one is still to send a message of the same kind; returns whether it did.
    fn go_on(
        &mut self,
        ctx: &Context,
        chunk: &mut UnderWay,
        waits: &mut [bool; Kind::NUM],
    ) -> Result<bool> {
        let mut moved = false;
        while chunk.stage != Stage::Sends {
            let (kind, targets) = chunk.next_sends(self.group.rank);
            let sends_none = targets.is_empty();
            let waits = &mut waits[kind as usize];
            if !chunk.poll(ctx)? || (*waits && !sends_none) {
                *waits |= !sends_none;
                return Ok(moved);
            }
            let targets = std::mem::take(chunk.next_sends(self.group.rank).1);
            let (given, is_result) = match chunk.stage {
                Stage::Inputs => (self.gather(chunk)?, chunk.chunk.has_result(self.group.rank)),
                _ => (self.result(chunk)?, true),
            };
            let destinations = chunk.chunk.piece.destinations;
            if is_result && self.output.is_none() && destinations.has(self.group.rank) {
                self.in_flight.write(destinations.first, &given)?;
            }
            let (given, tag) = (Arc::new(given), tag(self.seq, kind));
            for to in targets {
                let send = Transfer::send(&ctx.mpi, &self.group, to, tag, given.clone())?;
                chunk.sends.push(send);
            }
            self.keep(given);
            chunk.stage = match chunk.result {
                Some(_) => Stage::Result,
                None => Stage::Sends,
            };
            moved = true;
        }
        while let Some(send) = chunk.sends.last_mut()
            && send.poll(&ctx.mpi)?
        {
            if let Some((sent, _)) = chunk.sends.pop().and_then(Transfer::take) {
                self.keep(sent);
            }
        }
        Ok(moved)
    }

    /// Keeps a buffer for later, if nobody has it any more.
    fn keep(&mut self, buffer: Arc<Buffer>) {
        if let Some(buffer) = Arc::into_inner(buffer) {
            self.pool.give_back(buffer);
        }
    }

    /// The input of this rank, if it has one, with those that have come.
    fn gather(&mut self, chunk: &mut UnderWay) -> Result<Buffer> {
        let mut inputs = Vec::with_capacity(chunk.inputs.len());
        for (from, transfer) in std::mem::take(&mut chunk.inputs) {
            let input = self.taken(transfer, from)?;
            inputs.push((from, input));
        }
        let room = chunk.room.take();
        let (chunk, rank) = (&chunk.chunk, self.group.rank);
        if !chunk.piece.sources.has(rank)
            && let Some((_, only)) = inputs.pop()
        {
            return Ok(only);
        }
        let num_bytes = input_bytes(self.dtype, &self.group, chunk, rank);
        let mut given = room.unwrap_or_else(|| self.pool.take(num_bytes));
        let (in_flight, group) = (&self.in_flight, &*self.group);
        with_element!(
            self.dtype,
            combine(in_flight, group, chunk, &inputs, &mut given)
        )?;
        inputs
            .into_iter()
            .for_each(|(_, input)| self.pool.give_back(input));
        self.num_readers -= 1;
        if self.num_readers == 0 {
            self.in_flight.drop_input();
        }
        Ok(given)
    }

    /// The result that has come.
    fn result(&mut self, chunk: &mut UnderWay) -> Result<Buffer> {
        match (chunk.result.take(), chunk.part.result_from) {
            (Some(transfer), Some(from)) => self.taken(transfer, from),
            _ => Err(Error::Backend(format!(
                "{}: a result has not come",
                self.in_flight.call
            ))),
        }
    }

    /// What a rank of the group has sent; an error unless that is as much as it should be.
    fn taken(&self, transfer: Transfer<Buffer>, from: usize) -> Result<Buffer> {
        let (call, taken) = (&self.in_flight.call, transfer.take());
        match taken {
            Some((buffer, got)) if got == buffer.len() => Ok(buffer),
            taken => {
                let (got, expected) = taken.map_or((0, 0), |(buffer, got)| (got, buffer.len()));
                Err(Error::Backend(format!(
                    "{call}: rank {from} of the group sent {got} bytes, expected {expected}\n\
                     hint: all ranks must run the same version of the program"
                )))
            }
        }
    }
}

impl UnderWay {
    /// What it sends when what it waits for has come, and to whom.
    fn next_sends(&mut self, rank: usize) -> (Kind, &mut Vec<usize>) {
        let part = &mut self.part;
        match self.stage == Stage::Inputs && rank != self.chunk.owner {
            true => (Kind::Input, &mut part.inputs_to),
            false => (
                Kind::of_result(rank == self.chunk.owner),
                &mut part.result_to,
            ),
        }
    }

    /// Whether what it waits for has come.
    fn poll(&mut self, ctx: &Context) -> Result<bool> {
        match (self.stage, &mut self.result) {
            (Stage::Result, Some(result)) => result.poll(&ctx.mpi),
            _ => {
                for (_, input) in &mut self.inputs {
                    if !input.poll(&ctx.mpi)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }

    fn is_over(&self) -> bool {
        self.stage == Stage::Sends && self.sends.is_empty()
    }
}

/// Bytes of what `rank` has taken in for a chunk: values, or what they are accumulated in.
fn input_bytes(dtype: DType, group: &Group, chunk: &Chunk, rank: usize) -> usize {
    let dtype = match rank != chunk.owner && chunk.adds_up_host(group, rank) {
        true => element::accumulated(dtype),
        false => dtype,
    };
    chunk.piece.len * dtype.size_in_bytes()
}

/// Combines the input of `in_flight` with those of other ranks, or of their hosts, [pairwise](crate::pairwise).
fn combine<T: Element>(
    in_flight: &InFlight,
    group: &Group,
    chunk: &Chunk,
    inputs: &[(usize, Buffer)],
    given: &mut [u8],
) -> Result<()> {
    let op = in_flight
        .call
        .operation
        .reduce_op()
        .unwrap_or(ReduceOp::Sum);
    let is_owner = group.rank == chunk.owner;
    in_flight.read(
        chunk.piece.sources.first,
        chunk.piece.len,
        |input: &[T]| {
            let mut terms = vec![Term::input(group.rank, input)];
            // What an owner gets from other hosts they have added up, where hosts do.
            terms.extend(inputs.iter().map(|(from, values)| {
                match is_owner && chunk.adds_up_host(group, *from) {
                    true => Term {
                        ranks: group.hosts.block_of(*from),
                        values: Values::Combined(bytes::elements(values)),
                    },
                    false => Term::input(*from, bytes::elements(values)),
                }
            }));
            terms.sort_by_key(|term| term.ranks.start);
            match !is_owner && chunk.adds_up_host(group, group.rank) {
                true => reduce_block(op, &terms, group.members.len(), bytes::elements_mut(given)),
                false => reduce(op, &terms, &mut [bytes::elements_mut(given)]),
            }
        },
    )
}
