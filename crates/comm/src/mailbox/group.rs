//! Collectives of a few ranks by way of their mailboxes.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Device, Result, Tensor, bail};

use super::{FIRST_GROUP_TAG, Mailbox, Received};
use crate::operation::Message;
use crate::reduction::element::{Element, read_all, with_element, write};
use crate::reduction::plan::Plan;
use crate::{Communicator, Error, Operation, Pending, Request};

/// Collectives of a few ranks by way of their mailboxes: each sends its input to all, and computes its own output.
pub(super) struct MailGroup {
    mailbox: Arc<Mailbox>,
    members: Vec<usize>,
    /// In the group.
    rank: usize,
    /// By which messages of this group are known among those of others.
    id: u32,
    next_seq: AtomicU64,
}

impl MailGroup {
    pub fn new(mailbox: Arc<Mailbox>, members: Vec<usize>, id: u32) -> Result<Self> {
        let own = mailbox.rank();
        let Some(rank) = members.iter().position(|member| *member == own) else {
            bail!("rank {own} asks for a group of ranks {members:?}, of which it is none");
        };
        Ok(Self {
            mailbox,
            members,
            rank,
            id,
            next_seq: AtomicU64::new(0),
        })
    }

    fn tag(&self, seq: u64) -> u64 {
        FIRST_GROUP_TAG | (u64::from(self.id) << 31) | (seq & ((1 << 31) - 1))
    }

    /// The one tensor that a member has sent.
    fn recv(&self, from: usize, tag: u64, operation: &Operation) -> Result<Tensor> {
        let from = self.members[from];
        match self.mailbox.recv(Some(from), Some(tag))? {
            Received::Mail(mail) => operation.only_tensor(&mail.tensors).cloned(),
            Received::Left(departure) => {
                let rank = self.mailbox.rank();
                Err(Error::Mail(format!(
                    "{operation} on rank {rank} cannot complete: {departure}"
                ))
                .into())
            }
        }
    }

    fn messages(
        &self,
        xs: &[Tensor],
        messages: &[Message<()>],
        whole: &Operation,
    ) -> Result<Vec<Tensor>> {
        // Ranks send each other messages in one order, so one tag will do.
        let tag = self.tag(u64::MAX);
        let mut xs = xs.iter();
        for message in messages {
            if let Message::Send { dst, .. } = message {
                let sent = xs.next().map(Tensor::force_contiguous).transpose()?;
                let sent = sent.map_or_else(Vec::new, |sent| vec![sent]);
                self.mailbox.send_any(self.members[*dst], tag, &sent)?;
            }
        }
        let received = whole.receives().map(|(shape, dtype, src)| {
            let received = self.recv(src, tag, whole)?;
            if (received.shape(), received.dtype()) != (shape, dtype) {
                bail!(
                    "{whole}: {received:?} came from rank {src}, expected {shape:?} of {dtype:?}"
                );
            }
            Ok(received)
        });
        received.collect()
    }

    fn collective(
        &self,
        operation: &Operation,
        xs: &Tensor,
        place: Option<&Tensor>,
    ) -> Result<Tensor> {
        let tag = self.tag(self.next_seq.fetch_add(1, Ordering::Relaxed));
        // The caller may write to its own again when this returns.
        let own = [xs.force_contiguous()?];
        for (rank, member) in self.members.iter().enumerate() {
            if rank != self.rank {
                self.mailbox.send_any(*member, tag, &own)?;
            }
        }
        let inputs = (0..self.members.len()).map(|rank| match rank == self.rank {
            true => Ok(own[0].clone()),
            false => self.recv(rank, tag, operation),
        });
        let inputs: Vec<Tensor> = inputs.collect::<Result<_>>()?;
        let of_all = |xs: &Tensor| (operation.shape_of_all(xs.shape()), xs.dtype());
        let differs = |other: &Tensor| of_all(other) != of_all(xs);
        if let Some(rank) = inputs.iter().position(differs) {
            bail!(
                "{operation}: rank {} has {:?}, rank {} has {xs:?}",
                self.members[rank],
                inputs[rank],
                self.mailbox.rank()
            );
        }
        with_element!(xs.dtype(), output(self.rank, operation, &inputs, place))
    }
}

/// What a rank gets of a collective on these inputs.
fn output<T: Element>(
    rank: usize,
    operation: &Operation,
    inputs: &[Tensor],
    place: Option<&Tensor>,
) -> Result<Tensor> {
    let shape = operation.shape_of_all(inputs[rank].shape());
    let plan = Plan::new(operation, &shape, inputs.len(), Some(rank));
    let output = read_all(inputs, None, |inputs: &[&[T]]| plan.output_of(rank, inputs))?;
    match place {
        Some(place) => {
            write(place, 0, &output)?;
            Ok(place.clone())
        }
        None => {
            let dims = operation.output_dims(&shape, inputs.len(), rank);
            Tensor::from_vec(output, dims, &Device::Cpu)
        }
    }
}

impl Communicator for MailGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let (operation, xs) = (request.operation, request.tensors);
        Ok(Pending::ready(match operation {
            Operation::Messages { messages, .. } => self.messages(xs, messages, operation)?,
            _ => {
                let xs = operation.only_tensor(xs)?;
                vec![self.collective(operation, xs, request.place)?]
            }
        }))
    }

    fn subgroup(&self, ranks: &[usize], _: &[i64]) -> Result<Box<dyn Communicator>> {
        let members: Vec<usize> = ranks.iter().map(|rank| self.members[*rank]).collect();
        let mut hasher = DefaultHasher::new();
        // All ranks have called as much here.
        let seq = self.next_seq.load(Ordering::Relaxed);
        (self.id, seq, &members).hash(&mut hasher);
        let id = (hasher.finish() >> 32) as u32;
        Ok(Box::new(Self::new(self.mailbox.clone(), members, id)?))
    }
}
