//! What the run's [`Control`] is told of the operations of a group.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{Result, Tensor};
use candle_launch::{Control, RankGroup, Ticket, Verdict};

use crate::error::argument;
use crate::operation::call::Call;
use crate::operation::pending::Work;
use crate::{Communicator, Error, Pending, Request};

/// By what the run's [`Control`] knows a group; see [`ProcessGroup::watched`](crate::ProcessGroup::watched).
pub(crate) struct Watch {
    pub control: Arc<Control>,
    group: Arc<RankGroup>,
    /// The number of the group's first collective that the control plane knows.
    first_seq: u64,
    checks_collectives: bool,
}

impl Watch {
    /// Of the group of all ranks, from collective `first_seq` on.
    pub fn new(
        comm: &dyn Communicator,
        control: &Arc<Control>,
        (checks_collectives, first_seq): (bool, u64),
    ) -> Result<Self> {
        let (rank, world_size) = (control.rank(), control.world().members.len());
        if (comm.rank(), comm.world_size()) != (rank, world_size) {
            return Err(argument(format!(
                "the backend calls this process rank {} of {}, expected rank {rank} of {world_size}, as the launcher says",
                comm.rank(),
                comm.world_size()
            )));
        }
        Ok(Self {
            group: control.world().clone(),
            control: control.clone(),
            first_seq,
            checks_collectives,
        })
    }

    /// Of the group of these world ranks, which has been split off this one after `seq` collectives.
    pub fn subgroup(&self, members: &[usize], seq: u64) -> Self {
        let members = members.to_vec();
        let id = format!("{}/{seq}:{members:?}", self.group.id);
        Self {
            control: self.control.clone(),
            group: Arc::new(RankGroup { id, members }),
            first_seq: 0,
            checks_collectives: self.checks_collectives,
        }
    }

    /// Announces an operation, then starts it.
    pub fn start(
        &self,
        comm: &dyn Communicator,
        request: &mut Request<'_>,
    ) -> Result<Pending<Vec<Tensor>>> {
        request.ticket = Some(self.announce(request)?);
        let pending = comm.start(request)?;
        // Else the backend says when the operation is complete.
        Ok(match request.ticket.take() {
            None => pending,
            Some(ticket) => {
                ticket.started();
                Pending::from_work(Watched { pending, ticket })
            }
        })
    }

    /// Announces a call, compares it if that is asked for, and gives its ticket.
    fn announce(&self, request: &Request<'_>) -> Result<Ticket> {
        let (call, seq) = (
            &request.call,
            request.call.seq.map(|seq| seq - self.first_seq),
        );
        let operation = candle_launch::Operation {
            group: self.group.clone(),
            seq,
            call: call.what(),
            site: call.site,
        };
        if let Some(failure) = self.control.failure() {
            return Err(candle_core::Error::wrap(candle_launch::Error::RunFailed(
                failure,
            )));
        }
        let ticket = self.control.begin(operation.clone());
        if let (true, Some(seq)) = (self.checks_collectives, seq) {
            let verdict = (self.control.check(&operation)).map_err(candle_core::Error::wrap)?;
            self.judge(call, seq, verdict)?;
        }
        Ok(ticket)
    }

    fn judge(&self, call: &Call, seq: u64, verdict: Verdict) -> Result<()> {
        Err(match verdict {
            Verdict::Agree => return Ok(()),
            Verdict::Differ { first, second } => Error::Mismatch {
                group: self.group.to_string(),
                seq,
                first,
                second,
            },
            Verdict::Left { rank, report } => Error::PeerLeft {
                waiting: self.control.rank(),
                call: call.to_string(),
                rank,
                report,
            },
        }
        .into())
    }
}

/// A watched operation in flight.
struct Watched {
    pending: Pending<Vec<Tensor>>,
    ticket: Ticket,
}

impl Work for Watched {
    fn completed(&self) -> Option<Instant> {
        self.pending.completed()
    }

    fn wait(self: Box<Self>) -> Result<Vec<Tensor>> {
        self.ticket.waits();
        self.pending.wait_uncounted()
    }

    fn abandon(self: Box<Self>) {
        self.ticket.waits();
        drop(self.pending);
    }
}
