//! Operations that are on the GPU's streams.
//!
//! ```text
//! compute   .. makes the inputs ..  ready                          wait ..  uses the result, frees the inputs
//!                                        \                        /
//! group                                   waits, the operation, done
//! ```
//! `ready` and `done` are events: the GPU keeps this order by itself, and the host waits for nothing. What is only sent is a copy, and
//! the stream that computes does not wait for it: the [`watcher`](super::watcher) frees it when it has gone.

use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{Result, Tensor};

use super::group::NcclGroup;
use super::session::Session;
use super::watcher::{REPORT, WatchedOperation};
use crate::deadline::Deadline;
use crate::operation::pending::Work;
use crate::{Operation, Request};

/// How long a host that waits for a barrier sleeps between two polls.
const LONGEST_SLEEP: Duration = Duration::from_micros(500);

/// Tensors that an operation uses. In its end the stream that frees them waits for the operation, so they may be freed, and
/// written to, from then on.
pub(super) struct Held {
    tensors: Vec<Tensor>,
    /// Recorded behind the operation, once that is on the group's stream.
    done: Option<Arc<CudaEvent>>,
    compute: Arc<CudaStream>,
    group: Arc<CudaStream>,
}

impl Held {
    /// Makes the group's stream wait for what makes the tensors, which is before the event that it returns.
    pub fn new(
        tensors: Vec<Tensor>,
        compute: &Arc<CudaStream>,
        group: &Arc<CudaStream>,
    ) -> Result<(Self, CudaEvent)> {
        let ready = compute.record_event(None).w()?;
        group.wait(&ready).w()?;
        let held = Self {
            tensors,
            done: None,
            compute: compute.clone(),
            group: group.clone(),
        };
        Ok((held, ready))
    }

    /// From here on the stream that computes runs after the operation, and after nothing that the group was given later.
    fn end(&mut self) -> Result<()> {
        if self.tensors.is_empty() {
            return Ok(());
        }
        match &self.done {
            Some(done) => self.compute.wait(done).w()?,
            // It may be on the stream in part.
            None => self.compute.join(&self.group).w()?,
        }
        self.tensors.clear();
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("the GPU does not order its streams any more: {error}");
            // They may still be in use.
            std::mem::forget(std::mem::take(&mut self.tensors));
        }
    }
}

/// An operation that is on its group's stream.
pub(super) struct NcclInFlight {
    session: Arc<Session>,
    call: String,
    held: Held,
    is_barrier: bool,
}

impl NcclInFlight {
    /// What has just been put on the group's stream.
    pub fn new(
        (session, group): (&Arc<Session>, &Arc<NcclGroup>),
        request: &mut Request<'_>,
        (mut held, ready): (Held, CudaEvent),
    ) -> Result<Self> {
        let done = Arc::new(group.stream.record_event(None).w()?);
        held.done = Some(done.clone());
        let (call, ticket) = (request.call.in_group(), request.ticket.take());
        if let Some(ticket) = &ticket {
            ticket.queued();
        }
        let report = ticket.as_ref().map_or(Duration::ZERO, |_| REPORT);
        session.watch(WatchedOperation {
            call: call.clone(),
            group: group.clone(),
            ready: Some(ready),
            done,
            _sent: match request.operation.only_sends() {
                true => std::mem::take(&mut held.tensors),
                false => Vec::new(),
            },
            deadline: Deadline::new(session.run.deadline + report),
            ticket,
        });
        Ok(Self {
            session: session.clone(),
            call,
            held,
            is_barrier: *request.operation == Operation::Barrier,
        })
    }
}

/// Waits for the GPU. The watcher ends a wait that lasts too long: it aborts, which completes the event.
fn wait_on_host(done: &CudaEvent) -> Result<()> {
    let mut sleep = Duration::from_micros(10);
    while !done.try_is_complete().w()? {
        std::thread::sleep(sleep);
        sleep = (sleep * 2).min(LONGEST_SLEEP);
    }
    Ok(())
}

impl Work for NcclInFlight {
    fn wait(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        let run = self.session.run.clone();
        run.compute.context().bind_to_thread().w()?;
        self.held.end()?;
        if let (true, Some(done)) = (self.is_barrier, &self.held.done) {
            wait_on_host(done)?;
        }
        // After the wait: a failure comes before the abort that ends it.
        Ok(run.check(&self.call).map(|()| Vec::new())?)
    }

    fn abandon(self: Box<Self>) {
        if let Err(error) = self.session.run.compute.context().bind_to_thread() {
            tracing::warn!("a dropped operation has no GPU: {error}");
        }
    }
}
