//! The thread that looks after operations on the GPU: NCCL itself would wait for a missing rank for ever.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::CudaEvent;

use super::group::Group;
use super::session::Session;
use crate::Error;

/// How often it looks.
const TICK: Duration = Duration::from_millis(10);

/// An operation that is under way on the GPU.
pub(super) struct UnderWay {
    /// What was called, where, in which group.
    pub call: String,
    pub group: Arc<Group>,
    /// Recorded behind it.
    pub done: Arc<CudaEvent>,
    /// Without the time for which the process was stopped.
    pub waited: Duration,
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

/// Forgets what is complete; an error if something has failed or lasts too long.
fn look(session: &Session, under_way: &mut Vec<UnderWay>, slept: Duration) -> Result<(), Error> {
    let mut failure = session.failure();
    under_way.retain_mut(|operation| {
        operation.waited += slept;
        match operation.done.try_is_complete() {
            Ok(done) => !done,
            Err(error) => {
                let call = &operation.call;
                failure.get_or_insert(Error::Backend(format!(
                    "{call}: the GPU has failed: {error}"
                )));
                false
            }
        }
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    for operation in &*under_way {
        if let Some(error) = operation.group.async_error() {
            return Err(Error::Backend(format!(
                "{} failed on rank {}: {error}",
                operation.call, session.rank
            )));
        }
        if operation.waited > session.deadline {
            return Err(session.late(&operation.call));
        }
    }
    Ok(())
}
