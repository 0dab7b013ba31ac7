//! How ranks meet: each sends its first message to all others of the group and waits for theirs.
//!
//! No rank moves data before it knows that all ranks have called the same operation. So nothing is sent that nobody waits
//! for, ranks that disagree are found before a byte is moved, and a rank knows who is missing.

use std::sync::Arc;

use super::context::Context;
use super::header::{self, Header};
use super::tags;
use super::transfer::Transfer;
use crate::Error;
use crate::error::group_name;

type Result<T> = std::result::Result<T, Error>;

/// The first messages of an operation.
pub(super) struct Meeting {
    group: usize,
    seq: u64,
    /// By group rank; this rank's own is there from the start.
    said: Vec<Option<Header>>,
    receives: Vec<Option<Transfer<Vec<u8>>>>,
    sends: Vec<Transfer<Arc<Vec<u8>>>>,
}

impl Meeting {
    /// Sends `own` to the others.
    pub fn begin(ctx: &Context, group: usize, seq: u64, own: Header) -> Result<Self> {
        let here = &ctx.groups[group];
        let (message, tag) = (Arc::new(own.encode()), tags::header(seq));
        let mut receives: Vec<_> = here.members.iter().map(|_| None).collect();
        let mut sends = Vec::with_capacity(receives.len());
        for rank in here.others() {
            let room = vec![0u8; header::MAX_BYTES];
            receives[rank] = Some(Transfer::receive(&ctx.mpi, here.comm, rank, tag, room)?);
        }
        for rank in here.others() {
            let message = message.clone();
            sends.push(Transfer::send(&ctx.mpi, here.comm, rank, tag, message)?);
        }
        let mut meeting = Self {
            group,
            seq,
            said: vec![None; here.members.len()],
            receives,
            sends,
        };
        meeting.note(ctx, here.rank, &own);
        meeting.said[here.rank] = Some(own);
        Ok(meeting)
    }

    /// Takes in what has come; returns whether something has.
    pub fn poll(&mut self, ctx: &Context) -> Result<bool> {
        let mut moved = false;
        for rank in 0..self.receives.len() {
            let Some(receive) = &mut self.receives[rank] else {
                continue;
            };
            if !receive.poll(&ctx.mpi)? {
                continue;
            }
            moved = true;
            let taken = self.receives[rank].take().and_then(Transfer::take);
            let bytes = taken.as_ref().map(|(bytes, len)| &bytes[..*len]);
            let Some(header) = bytes.and_then(Header::decode) else {
                return Err(Error::Backend(format!(
                    "rank {} sent something else than the start of an operation\n\
                     hint: all ranks must run the same version of the program",
                    ctx.groups[self.group].members[rank]
                )));
            };
            self.note(ctx, rank, &header);
            self.said[rank] = Some(header);
        }
        while let Some(send) = self.sends.last_mut()
            && send.poll(&ctx.mpi)?
        {
            self.sends.pop();
            moved = true;
        }
        Ok(moved)
    }

    fn note(&self, ctx: &Context, rank: usize, header: &Header) {
        let members = &ctx.groups[self.group].members;
        let (group, seq) = (group_name(members), self.seq);
        let operation = format!(
            "{} ({group}, operation number {seq})",
            header.call_at_site()
        );
        ctx.last_calls.note(members[rank], operation);
    }

    /// The error if two ranks that are here called different operations.
    pub fn mismatch(&self, ctx: &Context) -> Option<Error> {
        let members = &ctx.groups[self.group].members;
        let mut here = (members.iter().zip(&self.said))
            .filter_map(|(rank, said)| Some((*rank, said.as_ref()?)));
        let first = here.next()?;
        let second = here.find(|(_, header)| header.call != first.1.call)?;
        let mut pair = [first, second];
        pair.sort_by_key(|(rank, _)| *rank);
        let [first, second] = pair.map(|(rank, header)| (rank, header.call_at_site()));
        Some(Error::Mismatch {
            group: group_name(members),
            seq: self.seq,
            first,
            second,
        })
    }

    /// The world ranks that have not come.
    pub fn missing(&self, ctx: &Context) -> Vec<usize> {
        let members = ctx.groups[self.group].members.iter();
        members
            .zip(&self.said)
            .filter_map(|(rank, said)| said.is_none().then_some(*rank))
            .collect()
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
        for receive in self.receives.iter_mut().filter_map(Option::take) {
            receive.cancel(&ctx.mpi)?;
        }
        Ok(())
    }
}
