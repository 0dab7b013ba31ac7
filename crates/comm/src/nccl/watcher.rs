//! The thread that looks after operations on the GPU: NCCL itself would wait for a missing rank for ever.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_launch::Ticket;

use super::group::NcclGroup;
use super::rank_run::RankRun;
use crate::Error;
use crate::deadline::Deadline;

/// How often it polls.
const TICK: Duration = Duration::from_millis(10);

/// How long after the deadline an operation is ended that the run's control plane knows: by then it has said which rank is late.
pub(super) const REPORT: Duration = Duration::from_secs(5);

/// An operation that is under way on the GPU.
pub(super) struct WatchedOperation {
    /// What was called, where, in which group.
    pub call: String,
    pub group: Arc<NcclGroup>,
    /// The event recorded after what makes its inputs; none once the GPU has reached it.
    pub ready: Option<CudaEvent>,
    /// The event recorded after the operation.
    pub done: Arc<CudaEvent>,
    /// What it only sends, which nothing else keeps until it is complete.
    pub _sent: Vec<Tensor>,
    /// Counts from when the GPU has come to it, as the control plane does: what the GPU does before is no wait.
    pub deadline: Deadline,
    /// By which the run's control plane knows it, if there is one.
    pub ticket: Option<Ticket>,
}

/// Starts the watcher of a run, which ends when the sender is dropped and nothing is under way.
pub(super) fn start(
    run: Arc<RankRun>,
) -> std::io::Result<(Sender<WatchedOperation>, JoinHandle<()>)> {
    let (sender, receiver) = channel();
    let thread = Builder::new()
        .name(format!("nccl-{}", run.rank))
        .spawn(move || {
            if let Err(error) = run.compute.context().bind_to_thread() {
                tracing::warn!("the watcher has no GPU: {error}");
                return;
            }
            watch(&run, &receiver);
        })?;
    Ok((sender, thread))
}

fn watch(run: &RankRun, started: &Receiver<WatchedOperation>) {
    let mut under_way: Vec<WatchedOperation> = Vec::new();
    loop {
        if under_way.is_empty() {
            let Ok(operation) = started.recv() else {
                return;
            };
            under_way.push(operation);
        }
        let asleep = Instant::now();
        sleep(TICK);
        let slept = asleep.elapsed();
        under_way.extend(started.try_iter());
        if let Err(failure) = poll(run, &mut under_way, slept) {
            run.fail(failure);
            // Now nothing is read any more.
            under_way.clear();
        }
    }
}

impl WatchedOperation {
    /// Whether it is complete; tells the control plane how far it is. `is_first`: no earlier one of its group is under way, behind
    /// which it would wait.
    fn poll(&mut self, slept: Duration, is_first: bool) -> Result<bool, Error> {
        if self.ready.is_none() && is_first {
            self.deadline.count(slept, TICK);
        }
        let is_past = |event: &CudaEvent| {
            event.try_is_complete().map_err(|error| {
                Error::Backend(format!("{}: the GPU has failed: {error}", self.call))
            })
        };
        let is_ready = |ready: &CudaEvent| is_past(ready).unwrap_or(true);
        if is_first && self.ready.as_ref().is_some_and(is_ready) {
            self.ready = None;
            if let Some(ticket) = &self.ticket {
                ticket.gpu_waits();
            }
        }
        is_past(&self.done)
    }
}

/// Forgets what is complete; an error if something has failed or lasts too long.
fn poll(
    run: &RankRun,
    under_way: &mut Vec<WatchedOperation>,
    slept: Duration,
) -> Result<(), Error> {
    let mut failure = run.failure();
    let mut groups: Vec<Arc<NcclGroup>> = Vec::new();
    under_way.retain_mut(|operation| {
        let is_first = !groups
            .iter()
            .any(|group| Arc::ptr_eq(group, &operation.group));
        match operation.poll(slept, is_first) {
            Ok(true) => false,
            Ok(false) => {
                groups.push(operation.group.clone());
                true
            }
            Err(error) => {
                failure.get_or_insert(error);
                false
            }
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
                operation.call, run.rank
            )));
        }
        if operation.deadline.is_over() {
            return Err(run.late(&operation.call));
        }
    }
    Ok(())
}
