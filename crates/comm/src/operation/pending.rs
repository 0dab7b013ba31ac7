//! The result of an operation that has been started, and how long ranks wait for results.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use candle_core::{Device, Result, Tensor};

use crate::trace::{self, OpSpan};

/// What a backend keeps for an operation in flight.
pub(crate) trait Work: Send {
    /// When the operation was complete; `None` if it is not, or if nobody knows.
    fn completed(&self) -> Option<Instant> {
        None
    }

    /// Blocks until the operation is complete.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>>;

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
    work: Started,
    since: Instant,
    /// Makes the result of what the operation gives.
    finish: Finish<T>,
    /// What it is in a trace, while one is recorded, and where.
    traced: Option<Box<(OpSpan, Device)>>,
}

type Finish<T> = Box<dyn FnOnce(Vec<Tensor>) -> Result<T> + Send>;

/// An operation that is given up unless it is waited for; `None` if there is nothing to wait for.
struct Started(Option<Box<dyn Work>>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(work) = self.0.take() {
            work.abandon();
        }
    }
}

impl Pending<Vec<Tensor>> {
    pub(crate) fn from_work(work: impl Work + 'static) -> Self {
        Self::new(Some(Box::new(work)), Box::new(Ok))
    }
}

impl<T> Pending<T> {
    fn new(work: Option<Box<dyn Work>>, finish: Finish<T>) -> Self {
        Self {
            work: Started(work),
            since: Instant::now(),
            finish,
            traced: None,
        }
    }

    /// A result that is there already.
    pub fn ready(value: T) -> Self
    where
        T: Send + 'static,
    {
        Self::new(None, Box::new(|_| Ok(value)))
    }

    /// The operation with what `then` makes of its result, when it is waited for.
    pub fn map<U>(self, then: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: 'static,
    {
        let finish = self.finish;
        Pending {
            work: self.work,
            since: self.since,
            finish: Box::new(|results| then(finish(results)?)),
            traced: self.traced,
        }
    }

    /// The operation, which the trace that is being recorded calls what `op` returns.
    pub(crate) fn traced(mut self, op: impl FnOnce() -> (OpSpan, Device)) -> Self {
        self.traced = trace::is_on().then(|| Box::new(op()));
        self
    }

    /// When the operation was complete, if it is and the backend knows.
    pub(crate) fn completed(&self) -> Option<Instant> {
        self.work.0.as_ref()?.completed()
    }

    /// Whether it is known to be complete; what is not may be so, too.
    pub fn is_complete(&self) -> bool {
        self.work.0.is_none() || self.completed().is_some()
    }

    /// Blocks until the operation is complete and returns its result.
    ///
    /// # Errors
    /// All that can go wrong with an operation: it does not match those of the other ranks, a rank failed, panicked or
    /// left, or the deadline passed.
    pub fn wait(mut self) -> Result<T> {
        if self.work.0.is_none() {
            return self.wait_uncounted();
        }
        let (since, completed) = (self.since, self.completed());
        count_hidden(since, completed);
        let traced = self.traced.take();
        let start = Instant::now();
        let mut result = self.wait_uncounted();
        if let Some((_, device)) = traced.as_deref() {
            result = result.and_then(|value| device.synchronize().map(|()| value));
        }
        let end = Instant::now();
        count_waited(start, end);
        if let Some((op, _)) = traced.map(|traced| *traced) {
            trace::push_waited(op, since, completed, (start, end));
        }
        result
    }

    /// As [`wait`](Self::wait), for a wait inside another one.
    pub(crate) fn wait_uncounted(mut self) -> Result<T> {
        let results = match self.work.0.take() {
            Some(work) => work.wait()?,
            None => Vec::new(),
        };
        (self.finish)(results)
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").finish_non_exhaustive()
    }
}

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static HIDDEN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static COVERED: RefCell<Covered> = const { RefCell::new(Covered(Vec::new())) };
}

/// Time that the calling thread has spent waiting for operations since it started; differences of it tell what part of a
/// step was communication.
pub fn waited() -> Duration {
    WAITED.get()
}

/// Time in which the calling thread, since it started, had operations in flight and did not wait: the part of communication that
/// is hidden under computation. Moments with several operations in flight count once; an operation counts when it is waited for.
/// On GPUs, where operations are in flight on streams of their own, it does not tell.
pub fn hidden() -> Duration {
    HIDDEN.get()
}

/// Counts a wait.
fn count_waited(start: Instant, end: Instant) {
    WAITED.set(WAITED.get() + (end - start));
    COVERED.with_borrow_mut(|covered| covered.add(start, end));
}

/// Counts what an operation that is about to be waited for has hidden since it was started.
fn count_hidden(started: Instant, completed: Option<Instant>) {
    let now = Instant::now();
    let end = completed.map_or(now, |at| at.min(now));
    let new = COVERED.with_borrow_mut(|covered| covered.add(started, end));
    HIDDEN.set(HIDDEN.get() + new);
}

/// Spans of time, disjoint and in order, in which the thread waited or had operations in flight that have been counted.
struct Covered(Vec<(Instant, Instant)>);

/// More spans than a step has. The oldest are forgotten.
const MAX_SPANS: usize = 4096;

impl Covered {
    /// Adds a span; how much of it was not covered before.
    fn add(&mut self, from: Instant, to: Instant) -> Duration {
        if to <= from {
            return Duration::ZERO;
        }
        let spans = &mut self.0;
        // The spans that touch it.
        let first = spans.partition_point(|span| span.1 < from);
        let end = spans.partition_point(|span| span.0 <= to);
        let touched = &spans[first..end];
        let known = touched.iter().map(|span| span.1.min(to) - span.0.max(from));
        let known: Duration = known.sum();
        let joined = touched.iter().fold((from, to), |joined, span| {
            (joined.0.min(span.0), joined.1.max(span.1))
        });
        spans.splice(first..end, [joined]);
        if spans.len() > MAX_SPANS {
            spans.drain(..MAX_SPANS / 2);
        }
        (to - from) - known
    }
}

#[cfg(test)]
mod tests {
    use super::Covered;
    use std::time::{Duration, Instant};

    /// What spans, in milliseconds, add one after the other.
    fn added(spans: &[(u64, u64)]) -> Vec<u64> {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut covered = Covered(Vec::new());
        let add = |(from, to): &(u64, u64)| covered.add(at(*from), at(*to)).as_millis() as u64;
        spans.iter().map(add).collect()
    }

    #[test]
    fn a_moment_counts_once_in_whatever_order_spans_come() {
        // Operations that are waited for from the last to the first.
        assert_eq!(added(&[(20, 30), (10, 28), (0, 25)]), [10, 10, 10]);
        assert_eq!(added(&[(0, 25), (10, 28), (20, 30)]), [25, 3, 2]);
        // One during which others were waited for.
        assert_eq!(added(&[(10, 12), (20, 22), (0, 30)]), [2, 2, 26]);
        assert_eq!(
            added(&[(0, 30), (10, 12), (30, 30), (35, 31)]),
            [30, 0, 0, 0]
        );
        // Apart, then joined.
        assert_eq!(added(&[(0, 1), (4, 5), (1, 4), (0, 6)]), [1, 1, 3, 1]);
    }
}
