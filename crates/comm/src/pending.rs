//! The result of an operation that has been started, and how long ranks wait for results.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use candle_core::Result;

use crate::trace::{self, TracedOp};

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
    /// What it is in a trace, while one is recorded.
    traced: Option<Box<TracedOp>>,
}

enum Inner<T> {
    Ready(Result<T>),
    /// Since when.
    Working(Box<dyn Work<T>>, Instant),
}

impl<T> Pending<T> {
    /// A result that is there already.
    pub fn ready(value: T) -> Self {
        Self {
            work: Some(Inner::Ready(Ok(value))),
            traced: None,
        }
    }

    pub(crate) fn from_work(work: Box<dyn Work<T>>) -> Self {
        Self {
            work: Some(Inner::Working(work, Instant::now())),
            traced: None,
        }
    }

    /// The operation with what `finish` makes of its result, when it is waited for.
    pub(crate) fn map<U>(
        mut self,
        finish: impl FnOnce(T) -> Result<U> + Send + 'static,
    ) -> Pending<U>
    where
        T: 'static,
    {
        let work = self.work.take().map(|work| match work {
            Inner::Ready(value) => Inner::Ready(value.and_then(finish)),
            Inner::Working(work, started) => {
                Inner::Working(Box::new(Mapped { work, finish }), started)
            }
        });
        let traced = self.traced.take();
        Pending { work, traced }
    }

    /// The operation, which the trace that is being recorded calls what `op` returns.
    pub(crate) fn traced(mut self, op: impl FnOnce() -> TracedOp) -> Self {
        self.traced = trace::is_on().then(|| Box::new(op()));
        self
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
    pub fn wait(mut self) -> Result<T> {
        let Some(Inner::Working(work, started)) = &self.work else {
            return self.wait_uncounted();
        };
        let (started, completed) = (*started, work.completed());
        count_hidden(started, completed);
        let traced = self.traced.take();
        let start = Instant::now();
        let mut result = self.wait_uncounted();
        if let (Ok(_), Some(traced)) = (&result, &traced)
            && let Err(err) = traced.device.synchronize()
        {
            result = Err(err);
        }
        let end = Instant::now();
        count_waited(start, end);
        if let Some(traced) = traced {
            traced.waited(started, completed, (start, end));
        }
        result
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

/// An operation and what makes its result.
struct Mapped<T, F> {
    work: Box<dyn Work<T>>,
    finish: F,
}

impl<T, U, F: FnOnce(T) -> Result<U> + Send> Work<U> for Mapped<T, F> {
    fn completed(&self) -> Option<Instant> {
        self.work.completed()
    }

    fn wait(self: Box<Self>) -> Result<U> {
        let Self { work, finish } = *self;
        finish(work.wait()?)
    }

    fn abandon(self: Box<Self>) {
        self.work.abandon();
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
