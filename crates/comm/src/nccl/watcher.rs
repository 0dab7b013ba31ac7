//! The thread that looks after operations on the GPU: NCCL itself would wait for a missing rank for ever.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_launch::Ticket;

use super::group::Group;
use super::session::Session;
use crate::Error;

/// How often it looks.
const TICK: Duration = Duration::from_millis(10);

/// How long after the deadline an operation is ended that the run's control plane knows: by then it has said which rank is late.
const REPORT: Duration = Duration::from_secs(5);

/// An operation that is under way on the GPU.
pub(super) struct UnderWay {
    /// What was called, where, in which group.
    pub call: String,
    pub group: Arc<Group>,
    /// Recorded behind what makes its inputs; none once the GPU has come so far.
    pub ready: Option<CudaEvent>,
    /// Recorded behind it.
    pub done: Arc<CudaEvent>,
    /// Without the time for which the process was stopped.
    pub waited: Duration,
    /// By which the run's control plane knows it, if there is one.
    pub ticket: Option<Ticket>,
}

/// Starts the watcher of a session, which ends after it.
pub(super) fn start(session: &Arc<Session>) -> std::io::Result<(Sender<UnderWay>, JoinHandle<()>)> {
    let (sender, receiver) = channel();
    let context = session.compute.context().clone();
    let session_ = Arc::downgrade(session);
    let thread = Builder::new()
        .name(format!("nccl-{}", session.rank))
        .spawn(move || {
            if let Err(error) = context.bind_to_thread() {
                tracing::warn!("the watcher has no GPU: {error}");
                return;
            }
            watch(&session_, &receiver);
        })?;
    Ok((sender, thread))
}

fn watch(session: &Weak<Session>, started: &Receiver<UnderWay>) {
    let mut under_way: Vec<UnderWay> = Vec::new();
    loop {
        if under_way.is_empty() {
            let Ok(operation) = started.recv() else {
                return;
            };
            under_way.push(operation);
        }
        let asleep = Instant::now();
        sleep(TICK);
        // A sleep counts as no longer than it was meant to be: the time that a process is stopped (Ctrl-Z) is no time that a
        // rank was late.
        let slept = asleep.elapsed().min(TICK);
        let Some(session) = session.upgrade() else {
            return;
        };
        under_way.extend(started.try_iter());
        if let Err(failure) = look(&session, &mut under_way, slept) {
            under_way.clear();
            session.fail(failure);
        }
    }
}

impl UnderWay {
    /// Whether it is complete; tells the control plane how far it is.
    fn look(&mut self, slept: Duration) -> Result<bool, Error> {
        self.waited += slept;
        let is_past = |event: &CudaEvent| {
            event.try_is_complete().map_err(|error| {
                Error::Backend(format!("{}: the GPU has failed: {error}", self.call))
            })
        };
        if self
            .ready
            .as_ref()
            .is_some_and(|ready| is_past(ready).unwrap_or(true))
        {
            self.ready = None;
            if let Some(ticket) = &self.ticket {
                ticket.waits();
            }
        }
        is_past(&self.done)
    }
}

/// Forgets what is complete; an error if something has failed or lasts too long.
fn look(session: &Session, under_way: &mut Vec<UnderWay>, slept: Duration) -> Result<(), Error> {
    let mut failure = session.failure();
    under_way.retain_mut(|operation| match operation.look(slept) {
        Ok(is_complete) => !is_complete,
        Err(error) => {
            failure.get_or_insert(error);
            false
        }
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    for operation in &*under_way {
        if let Some(failure) = operation.ticket.as_ref().and_then(Ticket::failure) {
            return Err(Error::Backend(failure.message));
        }
        if let Some(error) = operation.group.async_error() {
            return Err(Error::Backend(format!(
                "{} failed on rank {}: {error}",
                operation.call, session.rank
            )));
        }
        let report = operation.ticket.as_ref().map_or(Duration::ZERO, |_| REPORT);
        if operation.waited > session.deadline + report {
            return Err(session.late(&operation.call));
        }
    }
    Ok(())
}
