//! Operations that are on the GPU's streams.
//!
//! ```text
//! compute   .. makes the inputs ..  ready                          wait ..  uses the result, frees the inputs
//!                                        \                        /
//! group                                   waits, the operation, done
//! ```
//! `ready` and `done` are events: the GPU keeps this order by itself, and the host waits for nothing.

use std::sync::Arc;
use std::time::Duration;

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{Result, Tensor};

use super::group::Group;
use super::session::Session;
use super::watcher::{REPORT, UnderWay};
use crate::call_site;
use crate::deadline::Deadline;
use crate::pending::Work;

/// How long a host that waits for a barrier sleeps between two polls.
const LONGEST_SLEEP: Duration = Duration::from_micros(500);

/// Tensors that an operation uses. In its end the stream that frees them waits for the operation, so they may be freed, and
/// written to, from then on.
pub(super) struct Held {
    tensors: Vec<Tensor>,
    /// What makes them is behind it.
    ready: Option<CudaEvent>,
    compute: Arc<CudaStream>,
    group: Arc<CudaStream>,
    is_over: bool,
}

impl Held {
    /// Makes the group's stream wait for what makes the tensors.
    pub fn new(
        tensors: Vec<Tensor>,
        compute: &Arc<CudaStream>,
        group: &Arc<CudaStream>,
    ) -> Result<Self> {
        let ready = compute.record_event(None).w()?;
        group.wait(&ready).w()?;
        Ok(Self {
            tensors,
            ready: Some(ready),
            compute: compute.clone(),
            group: group.clone(),
            is_over: false,
        })
    }

    /// From here on the stream that computes runs after the operation.
    fn end(&mut self, done: &CudaEvent) -> Result<()> {
        self.compute.wait(done).w()?;
        self.is_over = true;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.is_over
            && let Err(error) = self.compute.join(&self.group)
        {
            tracing::warn!("the GPU does not order its streams any more: {error}");
            // They may still be in use.
            std::mem::forget(std::mem::take(&mut self.tensors));
        }
    }
}

/// What an operation gives, made of what NCCL wrote.
pub(super) type Finish = Box<dyn FnOnce() -> Result<Vec<Tensor>> + Send>;

/// An operation that is on its group's stream.
pub(super) struct InFlight {
    session: Arc<Session>,
    call: String,
    // Before what it may free.
    held: Held,
    done: Arc<CudaEvent>,
    finish: Finish,
    /// Whether the host waits too: for a barrier.
    waits_on_host: bool,
}

impl InFlight {
    /// What has just been put on the group's stream.
    pub fn new(
        (session, group): (&Arc<Session>, &Arc<Group>),
        call: String,
        mut held: Held,
        (finish, waits_on_host): (Finish, bool),
    ) -> Result<Self> {
        let done = Arc::new(group.stream.record_event(None).w()?);
        let ticket = call_site::take_ticket();
        if let Some(ticket) = &ticket {
            ticket.queued();
        }
        let report = ticket.as_ref().map_or(Duration::ZERO, |_| REPORT);
        session.watch(UnderWay {
            call: call.clone(),
            group: group.clone(),
            ready: held.ready.take(),
            done: done.clone(),
            deadline: Deadline::new(session.state.deadline + report),
            ticket,
        });
        Ok(Self {
            session: session.clone(),
            call,
            held,
            done,
            finish,
            waits_on_host,
        })
    }

    /// Waits for the GPU. The watcher ends a wait that lasts too long: it aborts, which completes the event.
    fn wait_on_host(&self) -> Result<()> {
        let mut sleep = Duration::from_micros(10);
        while !self.done.try_is_complete().w()? {
            std::thread::sleep(sleep);
            sleep = (sleep * 2).min(LONGEST_SLEEP);
        }
        Ok(())
    }
}

impl Work<Vec<Tensor>> for InFlight {
    fn wait(mut self: Box<Self>) -> Result<Vec<Tensor>> {
        self.session.compute.context().bind_to_thread().w()?;
        self.held.end(&self.done)?;
        if self.waits_on_host {
            self.wait_on_host()?;
        }
        // After the wait: a failure comes before the abort that ends it.
        self.session.state.check(&self.call)?;
        let InFlight { held, finish, .. } = *self;
        drop(held);
        finish()
    }

    fn abandon(self: Box<Self>) {
        if let Err(error) = self.session.compute.context().bind_to_thread() {
            tracing::warn!("a dropped operation has no GPU: {error}");
        }
    }
}
