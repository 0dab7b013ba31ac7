//! The messages of a group on their way. Between two ranks the number of a send and of its receive are the same.
//!
//! A message is a head (dtype, shape, call site, small data), then the data in a second one. A receiver that asked
//! for something else, or gave up, takes the data in all the same, so that the next message is where it should be.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};

use super::Result;
use super::buffer::Buffer;
use super::context::Context;
use super::group::{self, MpiGroup};
use super::header::{self, Header, INLINE_BYTES};
use super::in_flight::MpiInFlight;
use super::transfer::{Transfer, poll_all};
use crate::Error;
use crate::memory::bytes;
use crate::operation::call::kind;
use crate::reduction::element::{self, Element, with_element};

/// A message to group rank `to`: a copy of a tensor.
pub(super) struct Outgoing {
    to: usize,
    head: Vec<u8>,
    /// What follows.
    data: Vec<u8>,
}

impl Outgoing {
    /// A message of a contiguous tensor, sent from `site`.
    pub fn new(to: usize, xs: &Tensor, site: String) -> candle_core::Result<Self> {
        fn copy<T: Element>(xs: &Tensor) -> candle_core::Result<Vec<u8>> {
            element::read(xs, (0, xs.elem_count()), |xs: &[T]| bytes::of(xs).to_vec())
        }
        let data = with_element!(xs.dtype(), copy(xs))?;
        let (here, data) = match data.len() <= INLINE_BYTES {
            true => (data, Vec::new()),
            false => (Vec::new(), data),
        };
        let head = Header {
            call: kind(xs.dtype(), xs.shape()),
            site,
            data: here,
            follows: data.len() as u64,
        };
        let head = head.encode();
        Ok(Self { to, head, data })
    }
}

/// The messages of a group on their way.
#[derive(Default)]
pub(super) struct Channels {
    sends: Vec<Transfer<Arc<Buffer>>>,
    /// By source, in order.
    receives: BTreeMap<usize, VecDeque<Receive>>,
}

/// A message that is being received; over without head and data.
#[derive(Default)]
struct Receive {
    head: Option<Transfer<Buffer>>,
    data: Option<Transfer<Buffer>>,
    /// Nothing if it was never asked for, or is something else.
    asked: Option<AskedMessage>,
}

/// A message as a rank has asked for it: which one of those that it asked for together.
struct AskedMessage {
    in_flight: Arc<MpiInFlight>,
    index: usize,
    shape: Shape,
    dtype: DType,
}

impl Channels {
    /// Starts what `in_flight` has called.
    pub fn start(
        &mut self,
        ctx: &Context,
        group: &MpiGroup,
        in_flight: Arc<MpiInFlight>,
        sends: Vec<Outgoing>,
    ) -> Result<()> {
        let call = &in_flight.call;
        let operation = format!("{call} ({})", group.name());
        ctx.shared.note(ctx.shared.world_rank, operation);
        let sources = call
            .operation
            .receives()
            .map(|(.., from)| group.members[from]);
        in_flight.await_messages(sources.collect());
        for (index, (shape, dtype, from)) in call.operation.receives().enumerate() {
            let asked = AskedMessage {
                in_flight: in_flight.clone(),
                index,
                shape: shape.clone(),
                dtype,
            };
            self.receive(ctx, group, from, Some(asked))?;
        }
        for Outgoing { to, head, data } in sends {
            let mut parts = vec![(group::MESSAGE_HEAD, head)];
            if !data.is_empty() {
                parts.push((group::MESSAGE_DATA, data));
            }
            for (tag, part) in parts {
                let part = Arc::new(Buffer::new(part));
                self.sends
                    .push(Transfer::send(&ctx.mpi, group, to, tag, part)?);
            }
        }
        Ok(())
    }

    /// Starts to receive the next message from rank `from`.
    fn receive(
        &mut self,
        ctx: &Context,
        group: &MpiGroup,
        from: usize,
        asked: Option<AskedMessage>,
    ) -> Result<()> {
        let room = Buffer::zeros(header::MAX_BYTES);
        let head = Transfer::receive(&ctx.mpi, group, from, group::MESSAGE_HEAD, room)?;
        let queue = self.receives.entry(from).or_default();
        queue.push_back(Receive {
            head: Some(head),
            asked,
            ..Receive::default()
        });
        Ok(())
    }

    /// Moves what can move; returns whether something did.
    pub fn poll(&mut self, ctx: &Context, group: &MpiGroup) -> Result<bool> {
        let mut moved = poll_all(&ctx.mpi, &mut self.sends)?;
        for (from, queue) in &mut self.receives {
            for receive in queue.iter_mut() {
                moved |= receive.poll(ctx, group, *from)?;
                // Data come in the order of the heads.
                if receive.head.is_some() {
                    break;
                }
            }
            queue.retain(|receive| receive.head.is_some() || receive.data.is_some());
        }
        Ok(moved)
    }

    pub fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.receives.values().all(VecDeque::is_empty)
    }

    /// Starts to receive the messages that have come and that nobody asked for; returns how many.
    pub fn take_in(&mut self, ctx: &Context, group: &MpiGroup) -> Result<u64> {
        let mut num_messages = 0;
        while let Some(sender) = ctx.mpi.probe(group.own_tag(group::MESSAGE_HEAD))?
            && let Some(from) = group.members.iter().position(|rank| *rank == sender)
        {
            self.receive(ctx, group, from, None)?;
            num_messages += 1;
        }
        Ok(num_messages)
    }

    /// Ends all receives with an error.
    pub fn fail(&mut self, error: &Error) {
        for receive in std::mem::take(&mut self.receives).into_values().flatten() {
            receive.fail(error.clone());
        }
        self.sends.clear();
    }

    /// Ends the receives from world rank `left`, which sends nothing more.
    pub fn fail_those_that_need(
        &mut self,
        ctx: &Context,
        group: &MpiGroup,
        left: usize,
        error: &dyn Fn(&str) -> Error,
    ) {
        let from_left =
            (self.receives.iter_mut()).filter(|(from, _)| group.members[**from] == left);
        for receive in from_left.flat_map(|(_, queue)| queue) {
            let Some(head) = receive.head.take() else {
                continue;
            };
            if let Some(asked) = &receive.asked {
                receive.fail(error(&asked.in_flight.call.to_string()));
            }
            if let Err(error) = head.cancel(&ctx.mpi) {
                tracing::warn!("a receive could not be given up: {error}");
            }
        }
    }
}

impl Receive {
    fn poll(&mut self, ctx: &Context, group: &MpiGroup, from: usize) -> Result<bool> {
        let mut moved = false;
        if let Some(head) = &mut self.head {
            if !head.poll(&ctx.mpi)? {
                return Ok(false);
            }
            let head = self.head.take().and_then(Transfer::take);
            let head = head.and_then(|(bytes, len)| Header::decode(&bytes[..len]));
            let head = head.ok_or_else(|| {
                Error::Backend(format!(
                    "rank {} sent something else than a message\n\
                     hint: all ranks must run the same version of the program",
                    group.members[from]
                ))
            })?;
            self.open(ctx, group, from, &head)?;
            moved = true;
        }
        if let Some(data) = &mut self.data {
            if !data.poll(&ctx.mpi)? {
                return Ok(moved);
            }
            moved = true;
            if let Some((data, got)) = self.data.take().and_then(Transfer::take) {
                if got != data.len() {
                    return Err(wrong_size(group.members[from], got, data.len()));
                }
                self.deliver(data)?;
            }
        }
        Ok(moved)
    }

    /// Takes in the head of the message.
    fn open(&mut self, ctx: &Context, group: &MpiGroup, from: usize, head: &Header) -> Result<()> {
        fn zeros<T: Element>(len: usize) -> Result<Buffer> {
            Ok(Buffer::new(T::zeros(len)))
        }
        let sender = group.members[from];
        let sent = format!("sent {}", head.call_at_site());
        let operation = format!("{sent} ({})", group.name());
        ctx.shared.note(sender, operation);
        if let Some(other) = (self.asked).take_if(|asked| asked.kind() != head.call) {
            let site = other.in_flight.call.site;
            let receives = format!("receives {} at {site}", other.kind());
            other.in_flight.complete(Err(Error::MessageMismatch {
                group: group.name(),
                sender: (sender, sent),
                receiver: (ctx.shared.world_rank, receives),
            }));
        }
        let num_bytes = head.data.len() + head.follows as usize;
        let (dtype, len) = match &self.asked {
            Some(asked) => (asked.dtype, asked.shape.elem_count()),
            // For nobody.
            None => (DType::U8, num_bytes),
        };
        let expected = len * dtype.size_in_bytes();
        if num_bytes != expected {
            return Err(wrong_size(sender, num_bytes, expected));
        }
        let mut room = with_element!(dtype, zeros(len))?;
        if head.follows == 0 {
            room.copy_from_slice(&head.data);
            return self.deliver(room);
        }
        let tag = group::MESSAGE_DATA;
        self.data = Some(Transfer::receive(&ctx.mpi, group, from, tag, room)?);
        Ok(())
    }

    /// Hands the data over, if somebody wants them.
    fn deliver(&mut self, data: Buffer) -> Result<()> {
        fn tensor<T: Element>(data: Buffer, shape: Shape) -> candle_core::Result<Tensor> {
            let values = data.into_vec::<T>().unwrap_or_default();
            Tensor::from_vec(values, shape, &Device::Cpu)
        }
        if let Some(asked) = self.asked.take() {
            let xs = with_element!(asked.dtype, tensor(data, asked.shape));
            asked.in_flight.arrived(asked.index, xs?);
        }
        Ok(())
    }

    fn fail(&self, error: Error) {
        if let Some(asked) = &self.asked {
            asked.in_flight.complete(Err(error));
        }
    }
}

impl AskedMessage {
    fn kind(&self) -> String {
        kind(self.dtype, &self.shape)
    }
}

fn wrong_size(sender: usize, got: usize, expected: usize) -> Error {
    Error::Backend(format!(
        "a message of rank {sender} has {got} bytes, expected {expected}\n\
         hint: all ranks must run the same version of the program"
    ))
}
