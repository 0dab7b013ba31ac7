//! The messages of a group on their way. Between two ranks the number of a send and of its receive are the same.
//!
//! A message is a head (dtype, shape, call site, small data), then the data in a second message. A receiver that asked
//! for something else, or gave up, takes the data in all the same, so that the next message is where it should be.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use super::context::{Context, Group};
use super::header::{self, Header};
use super::inbox::{self, Inbox};
use super::messages::{Batch, Data, Received, data_of};
use super::part::Part;
use super::tags;
use super::transfer::{Transfer, poll_all};
use crate::Error;
use crate::error::group_name;

type Result<T> = std::result::Result<T, Error>;

/// The messages of a group on their way.
#[derive(Default)]
pub(super) struct Channels {
    heads: Vec<Transfer<Vec<u8>>>,
    data: Vec<Transfer<Part<u8>>>,
    /// By source, in order.
    receives: BTreeMap<usize, VecDeque<Receive>>,
}

/// A message that is being received.
struct Receive {
    phase: Phase,
    inbox: Option<Box<dyn Inbox>>,
    /// dtype and shape
    kind: String,
    /// Who asked, and for which of the entries; nobody if the message was never asked for.
    batch: Option<(Rc<RefCell<Received>>, usize)>,
}

enum Phase {
    Head(Transfer<Vec<u8>>),
    Data,
    Over,
}

fn receive_head(ctx: &Context, group: &Group, from: usize) -> Result<Phase> {
    let room = vec![0u8; header::MAX_BYTES];
    let tag = tags::MESSAGE_HEAD;
    let head = Transfer::receive(&ctx.mpi, group.comm, from, tag, room)?;
    Ok(Phase::Head(head))
}

impl Channels {
    /// Starts a batch.
    pub fn start(&mut self, ctx: &Context, group: usize, mut batch: Batch) -> Result<()> {
        let here = &ctx.groups[group];
        let name = group_name(&here.members);
        let operation = format!("{} ({name})", batch.call);
        ctx.last_calls.note(ctx.world_rank, operation);
        let (sends, receives) = (
            std::mem::take(&mut batch.sends),
            std::mem::take(&mut batch.receives),
        );
        let sources = receives.iter().map(|receive| here.members[receive.from]);
        let received = Received::new(&batch, sources.collect());
        let received = Rc::new(RefCell::new(received));
        for (index, incoming) in receives.into_iter().enumerate() {
            let phase = receive_head(ctx, here, incoming.from)?;
            let queue = self.receives.entry(incoming.from).or_default();
            queue.push_back(Receive {
                phase,
                inbox: Some(incoming.inbox),
                kind: incoming.kind,
                batch: Some((received.clone(), index)),
            });
        }
        for outgoing in sends {
            let to = outgoing.to;
            let (head, data) = outgoing.into_head(&batch.site);
            let tag = tags::MESSAGE_HEAD;
            let head = Transfer::send(&ctx.mpi, here.comm, to, tag, head.encode())?;
            self.heads.push(head);
            if let Some(data) = data {
                self.data.extend(inbox::send((ctx, here.comm), to, data)?);
            }
        }
        Ok(())
    }

    /// Moves what can move; returns whether something did.
    pub fn poll(&mut self, ctx: &Context, group: usize) -> Result<bool> {
        let mut moved = poll_all(&ctx.mpi, &mut self.heads)?;
        moved |= poll_all(&ctx.mpi, &mut self.data)?;
        for (from, queue) in &mut self.receives {
            for receive in queue.iter_mut() {
                moved |= receive.poll(ctx, group, *from)?;
                // Data come in the order of the heads.
                if matches!(receive.phase, Phase::Head(_)) {
                    break;
                }
            }
            while let Some(front) = queue.front()
                && matches!(front.phase, Phase::Over)
            {
                queue.pop_front();
            }
        }
        Ok(moved)
    }

    pub fn is_idle(&self) -> bool {
        self.heads.is_empty()
            && self.data.is_empty()
            && self.receives.values().all(VecDeque::is_empty)
    }

    /// Starts to receive the messages that have come and that nobody asked for; returns how many.
    pub fn take_in(&mut self, ctx: &Context, group: usize) -> Result<u64> {
        let here = &ctx.groups[group];
        let mut num_messages = 0;
        while let Some(from) = ctx.mpi.probe(here.comm, tags::MESSAGE_HEAD)? {
            let queue = self.receives.entry(from).or_default();
            queue.push_back(Receive {
                phase: receive_head(ctx, here, from)?,
                inbox: None,
                kind: String::new(),
                batch: None,
            });
            num_messages += 1;
        }
        Ok(num_messages)
    }

    /// Ends all receives with an error.
    pub fn fail(&mut self, error: &Error) {
        for receive in std::mem::take(&mut self.receives).into_values().flatten() {
            if let Some((batch, _)) = &receive.batch {
                batch.borrow().fail(error.clone());
            }
        }
        self.heads.clear();
        self.data.clear();
    }

    /// Ends the receives from world rank `left`, which sends nothing more.
    pub fn fail_those_that_need(
        &mut self,
        ctx: &Context,
        group: usize,
        left: usize,
        error: &dyn Fn(&str) -> Error,
    ) {
        let members = &ctx.groups[group].members;
        let from_left = (self.receives.iter_mut()).filter(|(from, _)| members[**from] == left);
        for receive in from_left.flat_map(|(_, queue)| queue) {
            if let Phase::Head(head) = std::mem::replace(&mut receive.phase, Phase::Over) {
                if let Some((batch, _)) = &receive.batch {
                    let batch = batch.borrow();
                    batch.fail(error(&batch.call));
                }
                if let Err(error) = head.cancel(&ctx.mpi) {
                    tracing::warn!("a receive could not be given up: {error}");
                }
            } else {
                receive.phase = Phase::Data;
            }
        }
    }
}

impl Receive {
    fn poll(&mut self, ctx: &Context, group: usize, from: usize) -> Result<bool> {
        let mut moved = false;
        if let Phase::Head(head) = &mut self.phase {
            if !head.poll(&ctx.mpi)? {
                return Ok(false);
            }
            moved = true;
            if let Phase::Head(head) = std::mem::replace(&mut self.phase, Phase::Data) {
                let bytes = head.take();
                let head = bytes.and_then(|(bytes, len)| Header::decode(&bytes[..len]));
                self.open(ctx, group, from, head)?;
            }
        }
        if let Phase::Data = self.phase {
            let is_here = match &mut self.inbox {
                Some(inbox) => inbox.poll(ctx)?,
                None => true,
            };
            if is_here {
                self.phase = Phase::Over;
                self.deliver()?;
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Takes in the head of the message.
    fn open(
        &mut self,
        ctx: &Context,
        group: usize,
        from: usize,
        head: Option<Header>,
    ) -> Result<()> {
        let here = &ctx.groups[group];
        let sender = here.members[from];
        let head = head.unwrap_or_default();
        let Some(data) = data_of(&head) else {
            return Err(Error::Backend(format!(
                "rank {sender} sent something else than a message\n\
                 hint: all ranks must run the same version of the program"
            )));
        };
        let name = group_name(&here.members);
        let sent = format!("sent {}", head.call_at_site());
        ctx.last_calls.note(sender, format!("{sent} ({name})"));
        if let Some((batch, _)) = &self.batch
            && head.call != self.kind
        {
            let batch = batch.borrow();
            batch.fail(Error::MessageMismatch {
                group: name,
                sender: (sender, sent),
                receiver: (
                    ctx.world_rank,
                    format!("receives {} at {}", self.kind, batch.site),
                ),
            });
        }
        if head.call != self.kind {
            self.batch = None;
            self.inbox = None;
        }
        match data {
            Data::Here(data) => match &mut self.inbox {
                Some(inbox) => inbox.fill(data),
                None => Ok(()),
            },
            Data::Follow(len) => {
                let inbox = match self.inbox.take() {
                    Some(inbox) => inbox,
                    None => inbox::discard(len)?,
                };
                if inbox.num_bytes() != len {
                    return Err(Error::Backend(format!(
                        "rank {sender} says that {} has {len} bytes, expected {}",
                        self.kind,
                        inbox.num_bytes()
                    )));
                }
                self.inbox.insert(inbox).receive(ctx, here.comm, from)
            }
        }
    }

    /// Hands the data over, if somebody wants them.
    fn deliver(&mut self) -> Result<()> {
        if let (Some((batch, index)), Some(inbox)) = (self.batch.take(), self.inbox.take()) {
            batch.borrow_mut().set(index, inbox.take()?);
        }
        Ok(())
    }
}
