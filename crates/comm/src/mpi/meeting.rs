//! How ranks meet: each sends its first message to all others of the group and waits for theirs.
//!
//! No rank moves data before it knows that all ranks have called the same operation. So nothing is sent that nobody waits
//! for, ranks that disagree are found before a byte is moved, and a rank knows who is missing.

use std::sync::Arc;

use super::Result;
use super::buffer::Buffer;
use super::context::Context;
use super::group::{Kind, MpiGroup, tag};
use super::header::{self, Header};
use super::transfer::{Transfer, poll_all};
use crate::Error;

/// The first messages of an operation.
pub(super) struct Meeting {
    group: Arc<MpiGroup>,
    seq: u64,
    /// By group rank; this rank's own is there from the start.
    said: Vec<Option<Header>>,
    receives: Vec<Option<Transfer<Buffer>>>,
    sends: Vec<Transfer<Arc<Buffer>>>,
}

impl Meeting {
    /// Sends `own` to the others.
    pub fn begin(ctx: &Context, group: Arc<MpiGroup>, seq: u64, own: Header) -> Result<Self> {
        let (message, tag) = (Arc::new(Buffer::new(own.encode())), tag(seq, Kind::Header));
        let mut receives: Vec<_> = group.members.iter().map(|_| None).collect();
        let mut sends = Vec::with_capacity(receives.len());
        for rank in group.others() {
            let room = Buffer::zeros(header::MAX_BYTES);
            receives[rank] = Some(Transfer::receive(&ctx.mpi, &group, rank, tag, room)?);
        }
        for rank in group.others() {
            sends.push(Transfer::send(
                &ctx.mpi,
                &group,
                rank,
                tag,
                message.clone(),
            )?);
        }
        let (rank, said) = (group.rank, vec![None; receives.len()]);
        let mut meeting = Self {
            group,
            seq,
            said,
            receives,
            sends,
        };
        meeting.note(ctx, rank, own);
        Ok(meeting)
    }

    /// Takes in what has come; returns whether something has.
    pub fn poll(&mut self, ctx: &Context) -> Result<bool> {
        let mut moved = poll_all(&ctx.mpi, &mut self.sends)?;
        for rank in 0..self.receives.len() {
            let Some(receive) = &mut self.receives[rank] else {
                continue;
            };
            if !receive.poll(&ctx.mpi)? {
                continue;
            }
            moved = true;
            let taken = self.receives[rank].take().and_then(Transfer::take);
            let header = taken.and_then(|(bytes, len)| Header::decode(&bytes[..len]));
            let header = header.ok_or_else(|| {
                Error::Backend(format!(
                    "rank {} sent something else than the start of an operation\n\
                     hint: all ranks must run the same version of the program",
                    self.group.members[rank]
                ))
            })?;
            self.note(ctx, rank, header);
        }
        Ok(moved)
    }

    fn note(&mut self, ctx: &Context, rank: usize, header: Header) {
        let (call, group, seq) = (header.call_at_site(), self.group.name(), self.seq);
        let operation = format!("{call} ({group}, operation number {seq})");
        ctx.shared.note(self.group.members[rank], operation);
        self.said[rank] = Some(header);
    }

    /// The error if two ranks that are here called different operations.
    pub fn mismatch(&self) -> Option<Error> {
        let mut here = (self.group.members.iter().zip(&self.said))
            .filter_map(|(rank, said)| Some((*rank, said.as_ref()?)));
        let first = here.next()?;
        let second = here.find(|(_, header)| header.call != first.1.call)?;
        let mut pair = [first, second];
        pair.sort_by_key(|(rank, _)| *rank);
        let [first, second] = pair.map(|(rank, header)| (rank, header.call_at_site()));
        Some(Error::Mismatch {
            group: self.group.name(),
            seq: self.seq,
            first,
            second,
        })
    }

    /// The world ranks that have not come.
    pub fn missing(&self) -> Vec<usize> {
        let ranks = self.group.members.iter().zip(&self.said);
        let missing = ranks.filter(|(_, said)| said.is_none());
        missing.map(|(rank, _)| *rank).collect()
    }

    /// Whether all ranks are here.
    pub fn is_complete(&self) -> bool {
        self.said.iter().all(Option::is_some)
    }

    /// Whether nothing of it is under way.
    pub fn is_over(&self) -> bool {
        self.receives.iter().all(Option::is_none) && self.sends.is_empty()
    }

    /// What each rank sent with its first message, in rank order; once.
    pub fn take_data(&mut self) -> Vec<Vec<u8>> {
        let said = self.said.iter_mut().flatten();
        said.map(|header| std::mem::take(&mut header.data))
            .collect()
    }

    /// Waits for nobody any more.
    pub fn cancel(&mut self, ctx: &Context) -> Result<()> {
        self.sends.clear();
        for receive in self.receives.iter_mut().filter_map(Option::take) {
            receive.cancel(&ctx.mpi)?;
        }
        Ok(())
    }
}
