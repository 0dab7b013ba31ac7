//! How long a rank has been blocked by communication.

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Time that the calling thread has spent waiting for operations since it started; differences of it tell what part of a
/// step was communication.
pub fn waited() -> Duration {
    WAITED.get()
}

/// Runs `wait` and counts its time.
pub(crate) fn counted<T>(wait: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let value = wait();
    WAITED.set(WAITED.get() + start.elapsed());
    value
}
