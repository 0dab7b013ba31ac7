//! The result of an operation that has been started, and how long ranks wait for results.

use std::cell::Cell;
use std::time::{Duration, Instant};

use candle_core::Result;

/// What a backend keeps for an operation in flight.
pub(crate) trait Work<T>: Send {
    /// When the operation was complete; `None` if it is not, or if nobody knows.
    fn completed(&self) -> Option<Instant> {
        None
    }

    /// Blocks until the operation is complete.
    fn wait(self: Box<Self>) -> Result<T>;

    /// Gives up the result. On return the operation no longer needs the caller's tensors, and the other ranks can
    /// still complete it.
    fn abandon(self: Box<Self>);
}

/// The result of a started operation; [`wait`](Pending::wait) returns it.
///
/// Dropping it without waiting loses the result only: the operation still takes place for the other ranks, and once
/// the drop returns the inputs may be written to again.
///
/// On GPUs an operation is complete when it is on the streams of its ranks, which keep the order: `wait` and drop never wait
/// for a GPU.
///
/// `wait` blocks the thread. Never call it from a rayon worker (inside `par_iter`, `join` or `spawn`): the job that
/// produces the result may be queued behind the one that waits for it.
#[must_use = "an operation in flight must be waited for"]
pub struct Pending<T> {
    work: Option<Inner<T>>,
}

enum Inner<T> {
    Ready(Result<T>),
    /// Since when.
    Working(Box<dyn Work<T>>, Mark),
}

impl<T> Pending<T> {
    /// A result that is there already.
    pub fn ready(value: T) -> Self {
        Self {
            work: Some(Inner::Ready(Ok(value))),
        }
    }

    /// A result that `wait` blocks for and returns. `wait` is called exactly once, also when the handle is dropped.
    pub fn new(wait: impl FnOnce() -> Result<T> + Send + 'static) -> Self
    where
        T: 'static,
    {
        Self::from_work(Box::new(wait))
    }

    pub(crate) fn from_work(work: Box<dyn Work<T>>) -> Self {
        Self {
            work: Some(Inner::Working(work, Mark::now())),
        }
    }

    /// When the operation was complete, if it is and the backend knows.
    pub(crate) fn completed(&self) -> Option<Instant> {
        match &self.work {
            Some(Inner::Working(work, _)) => work.completed(),
            _ => None,
        }
    }

    /// Blocks until the operation is complete and returns its result.
    ///
    /// # Errors
    /// All that can go wrong with an operation: it does not match those of the other ranks, a rank failed, panicked or
    /// left, or the deadline passed.
    pub fn wait(self) -> Result<T> {
        if let Some(Inner::Working(work, started)) = &self.work {
            count_hidden(*started, work.completed());
        }
        counted(|| self.wait_uncounted())
    }

    /// As [`wait`](Self::wait), for a wait inside another one.
    pub(crate) fn wait_uncounted(mut self) -> Result<T> {
        match self.work.take() {
            Some(Inner::Ready(value)) => value,
            Some(Inner::Working(work, _)) => work.wait(),
            None => candle_core::bail!("this operation has been waited for already"),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(Inner::Working(work, _)) = self.work.take() {
            work.abandon();
        }
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

impl<T, F: FnOnce() -> Result<T> + Send> Work<T> for F {
    fn wait(self: Box<Self>) -> Result<T> {
        self()
    }

    fn abandon(self: Box<Self>) {
        if let Err(error) = self() {
            tracing::warn!("an operation whose result was dropped failed: {error}");
        }
    }
}

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static HIDDEN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Up to when hidden communication has been counted.
    static COUNTED: Cell<Option<Mark>> = const { Cell::new(None) };
}

/// A moment, and what the thread had waited until then.
#[derive(Clone, Copy)]
struct Mark {
    at: Instant,
    waited: Duration,
}

impl Mark {
    fn now() -> Self {
        Self {
            at: Instant::now(),
            waited: WAITED.get(),
        }
    }
}

/// Time in which the calling thread, since it started, had operations in flight and did not wait: the part of communication that
/// is hidden under computation. Moments with several operations in flight count once. On GPUs, where operations are in flight on
/// streams of their own, it does not tell.
pub fn hidden() -> Duration {
    HIDDEN.get()
}

/// Counts what an operation that is about to be waited for had hidden since `started`.
fn count_hidden(started: Mark, completed: Option<Instant>) {
    let counted = COUNTED.get().filter(|mark| mark.at > started.at);
    let from = counted.unwrap_or(started);
    let now = Mark::now();
    let end = completed.map_or(now.at, |at| at.min(now.at));
    let in_flight = end.saturating_duration_since(from.at);
    let waited = now.waited.saturating_sub(from.waited);
    HIDDEN.set(HIDDEN.get() + in_flight.saturating_sub(waited));
    COUNTED.set(Some(now));
}

/// Time that the calling thread has spent waiting for operations since it started; differences of it tell what part of a
/// step was communication.
pub fn waited() -> Duration {
    WAITED.get()
}

/// Runs `wait` and counts its time.
fn counted<T>(wait: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = wait();
    WAITED.set(WAITED.get() + start.elapsed());
    value
}
