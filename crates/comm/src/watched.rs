//! A backend's group whose operations the run's [`Control`] knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_launch::{Control, RankGroup, Ticket, Verdict};

use crate::call::describe;
use crate::call::{Call, Operation};
use crate::pending::Work;
use crate::{Communicator, Error, P2p, Pending, ReduceOp, call_site};

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

    fn call(&self, operation: Operation, xs: Option<&Tensor>, site: Site) -> Call {
        Call {
            operation,
            tensor: xs.map(|xs| (xs.shape().clone(), xs.dtype())),
            site,
        }
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

    fn next_seq(&self) -> u64 {
        self.next_seq.fetch_add(1, Ordering::Relaxed)
    }

    /// Announces a collective, then starts it.
    #[track_caller]
    fn collective<T: Send + 'static>(
        &self,
        operation: Operation,
        xs: Option<&Tensor>,
        start: impl FnOnce(&dyn Communicator) -> Result<Pending<T>>,
    ) -> Result<Pending<T>> {
        let call = self.call(operation, xs, call_site::current());
        let ticket = self.announce(&call, Some(self.next_seq()))?;
        self.start(ticket, call.site, start)
    }

    fn start<T: Send + 'static>(
        &self,
        ticket: Ticket,
        site: Site,
        start: impl FnOnce(&dyn Communicator) -> Result<Pending<T>>,
    ) -> Result<Pending<T>> {
        let start = || call_site::scope(site, || start(&*self.inner));
        let (pending, ticket) = call_site::offer(ticket, start);
        let pending = pending?;
        // Else the backend says when the operation is complete.
        Ok(match ticket {
            None => pending,
            Some(ticket) => {
                ticket.started();
                Pending::from_work(Box::new(WatchedWork { pending, ticket }))
            }
        })
    }

    /// The world ranks of a group that has just been split off.
    fn members(&self, inner: &dyn Communicator) -> Result<Vec<usize>> {
        let rank = self.control.rank();
        if inner.world_size() == 1 {
            return Ok(vec![rank]);
        }
        let rank = i64::try_from(rank).map_err(candle_core::Error::wrap)?;
        let mine = Tensor::new(&[rank], inner.device())?;
        let members: Vec<i64> = inner.all_gather(&mine)?.wait()?.to_vec1()?;
        let members = members.into_iter().map(usize::try_from);
        let members: std::result::Result<_, _> = members.collect();
        members.map_err(candle_core::Error::wrap)
    }
}

type Site = &'static std::panic::Location<'static>;

/// A watched operation in flight.
struct WatchedWork<T> {
    pending: Pending<T>,
    ticket: Ticket,
}

impl<T: Send> Work<T> for WatchedWork<T> {
    fn completed(&self) -> Option<Instant> {
        self.pending.completed()
    }

    fn wait(self: Box<Self>) -> Result<T> {
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

    #[track_caller]
    fn all_reduce(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let operation = Operation::AllReduce(op);
        self.collective(operation, Some(xs), |inner| inner.all_reduce(xs, op))
    }

    #[track_caller]
    fn all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.collective(Operation::AllGather, Some(xs), |inner| inner.all_gather(xs))
    }

    #[track_caller]
    fn reduce_scatter(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let operation = Operation::ReduceScatter(op);
        self.collective(operation, Some(xs), |inner| inner.reduce_scatter(xs, op))
    }

    #[track_caller]
    fn all_reduce_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        let operation = Operation::AllReduce(op);
        self.collective(operation, Some(xs), |inner| {
            inner.all_reduce_in_place(xs, op)
        })
    }

    #[track_caller]
    fn reduce_scatter_in_place(&self, xs: &Tensor, op: ReduceOp) -> Result<Pending<Tensor>> {
        self.collective(Operation::ReduceScatter(op), Some(xs), |inner| {
            inner.reduce_scatter_in_place(xs, op)
        })
    }

    #[track_caller]
    fn all_gather_in_place(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.collective(Operation::AllGather, Some(xs), |inner| {
            inner.all_gather_in_place(xs)
        })
    }

    #[track_caller]
    fn broadcast(&self, xs: &Tensor, root: usize) -> Result<Pending<Tensor>> {
        let operation = Operation::Broadcast { root };
        self.collective(operation, Some(xs), |inner| inner.broadcast(xs, root))
    }

    #[track_caller]
    fn all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        self.collective(Operation::AllToAll, Some(xs), |inner| inner.all_to_all(xs))
    }

    #[track_caller]
    fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let operation = Operation::Batch(describe(ops, &self.group.members).into());
        let call = self.call(operation, None, call_site::current());
        let ticket = self.announce(&call, None)?;
        self.start(ticket, call.site, |inner| inner.batch_send_recv(ops))
    }

    #[track_caller]
    fn barrier(&self) -> Result<Pending<()>> {
        self.collective(Operation::Barrier, None, |inner| inner.barrier())
    }

    #[track_caller]
    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        let call = self.call(Operation::Split, None, call_site::current());
        let seq = self.next_seq();
        let _ticket = self.announce(&call, Some(seq))?;
        let inner = call_site::scope(call.site, || self.inner.split(color, key))?;
        let inner: Arc<dyn Communicator> = Arc::from(inner);
        let members = call_site::scope(call.site, || self.members(&*inner))?;
        let id = format!("{}/{seq}:{color}", self.group.id);
        Ok(Box::new(Self {
            inner,
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
