//! A backend's group whose operations the run's [`Control`] knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_launch::{Control, RankGroup, Ticket, Verdict};

use crate::call::Call;
use crate::pending::Work;
use crate::{Communicator, Error, Operation, Pending, ReduceOp, Request};

/// A backend's group whose operations the run's [`Control`] knows: what a rank does is in the messages that the others print
/// when it dies or hangs, and the deadline counts.
///
/// With `checks_collectives` no collective starts before all ranks of the group have called the same one on the same shape and
/// dtype; a difference is an [`Error::Mismatch`] on all of them. Each start then waits for the slowest rank and one round trip to
/// rank 0. Sends and receives are not compared this way, since they concern two ranks only: backends compare a message
/// with its receive.
pub struct Watched {
    inner: Arc<dyn Communicator>,
    control: Arc<Control>,
    group: Arc<RankGroup>,
    next_seq: AtomicU64,
    checks_collectives: bool,
}

impl Watched {
    /// Watches a backend's group of all ranks.
    ///
    /// # Errors
    /// The backend counts the ranks otherwise than the control does.
    pub fn new(
        inner: Arc<dyn Communicator>,
        control: Arc<Control>,
        checks_collectives: bool,
    ) -> Result<Self> {
        let (group, rank) = (control.world().clone(), control.rank());
        if (inner.rank(), inner.world_size()) != (rank, group.members.len()) {
            return Err(Error::Argument(format!(
                "the backend calls this process rank {} of {}, expected rank {rank} of {}, as the launcher says",
                inner.rank(),
                inner.world_size(),
                group.members.len()
            ))
            .into());
        }
        Ok(Self {
            inner,
            control,
            group,
            next_seq: AtomicU64::new(0),
            checks_collectives,
        })
    }

    /// Announces a call, compares it if that is asked for, and gives its ticket. Messages have no number.
    fn announce(&self, call: &Call, seq: Option<u64>) -> Result<Ticket> {
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
struct WatchedWork {
    pending: Pending<Vec<Tensor>>,
    ticket: Ticket,
}

impl Work for WatchedWork {
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

impl Communicator for Watched {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn device(&self) -> &Device {
        self.inner.device()
    }

    fn bytes_per_reduced_value(&self, op: ReduceOp, dtype: DType) -> usize {
        self.inner.bytes_per_reduced_value(op, dtype)
    }

    /// Announces an operation, then starts it.
    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        let call = Call::new(request, &self.group.members);
        let seq = match request.operation {
            Operation::Messages { .. } => None,
            _ => Some(self.next_seq.fetch_add(1, Ordering::Relaxed)),
        };
        request.ticket = Some(self.announce(&call, seq)?);
        let pending = self.inner.start(request)?;
        // Else the backend says when the operation is complete.
        Ok(match request.ticket.take() {
            None => pending,
            Some(ticket) => {
                ticket.started();
                Pending::from_work(WatchedWork { pending, ticket })
            }
        })
    }

    fn subgroup_number(&self) -> i64 {
        self.inner.subgroup_number()
    }

    fn subgroup(&self, ranks: &[usize], numbers: &[i64]) -> Result<Box<dyn Communicator>> {
        let inner = self.inner.subgroup(ranks, numbers)?;
        let members: Vec<usize> = ranks.iter().map(|rank| self.group.members[*rank]).collect();
        // All ranks have called as much in the parent.
        let seq = self.next_seq.load(Ordering::Relaxed);
        let id = format!("{}/{seq}:{members:?}", self.group.id);
        Ok(Box::new(Self {
            inner: Arc::from(inner),
            control: self.control.clone(),
            group: Arc::new(RankGroup { id, members }),
            next_seq: AtomicU64::new(0),
            checks_collectives: self.checks_collectives,
        }))
    }

    fn set_step(&self, step: u64, phase: &'static str) {
        self.control.set_step(step, phase);
    }

    fn check(&self) -> Result<()> {
        self.inner.check()
    }
}
