//! How long a rank waits for others.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A wait looks at the clock at least this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The time that a wait has lasted, and may last. Each sleep counts as no longer than it was meant to be: the time that a process
/// is stopped (Ctrl-Z) is no time that a rank was late.
pub(crate) struct Deadline {
    limit: Duration,
    waited: Duration,
}

impl Deadline {
    /// A wait that begins.
    pub fn new(limit: Duration) -> Self {
        Self {
            limit,
            waited: Duration::ZERO,
        }
    }

    /// Whether it has lasted too long.
    pub fn is_over(&self) -> bool {
        self.waited >= self.limit
    }

    /// How long it has lasted.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Sleeps until `condvar` is notified, or a moment, but no longer than the deadline.
    pub fn wait<'a, T>(
        &mut self,
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
    ) -> MutexGuard<'a, T> {
        self.wait_at_most(LONGEST_SLEEP, condvar, guard)
    }

    /// As [`Self::wait`], no longer than `longest` either.
    pub fn wait_at_most<'a, T>(
        &mut self,
        longest: Duration,
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
    ) -> MutexGuard<'a, T> {
        let sleep = self.limit.saturating_sub(self.waited);
        let sleep = sleep.min(LONGEST_SLEEP).min(longest);
        let asleep = Instant::now();
        let (guard, _) = condvar
            .wait_timeout(guard, sleep)
            .unwrap_or_else(PoisonError::into_inner);
        self.count(asleep.elapsed(), sleep);
        guard
    }

    /// Sleeps.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub fn sleep(&mut self, sleep: Duration) {
        let asleep = Instant::now();
        std::thread::sleep(sleep);
        self.count(asleep.elapsed(), sleep);
    }

    /// Counts a sleep that lasted `time` and was meant to be as long as `meant`.
    pub fn count(&mut self, time: Duration, meant: Duration) {
        self.waited += time.min(meant);
    }
}
