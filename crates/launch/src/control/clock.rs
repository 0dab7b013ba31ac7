//! The time that this process ran.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A clock that stands still while the process is stopped (SIGSTOP, Ctrl-Z, a suspended machine): that time is no time
/// for which other ranks were silent or late. It runs on [`tick`](Self::tick), to be called more often than the longest tick.
pub(super) struct RunClock(Mutex<Ticks>);

struct Ticks {
    run: Duration,
    last: Instant,
    /// A pause between two ticks counts as no more than this.
    longest: Duration,
}

impl Ticks {
    fn now(&self) -> Duration {
        self.run + self.last.elapsed().min(self.longest)
    }
}

impl RunClock {
    /// A clock for ranks that are taken for dead after this time: of a pause it counts no more than a sixth of that.
    pub(super) fn new(rank_timeout: Duration) -> Self {
        Self(Mutex::new(Ticks {
            run: Duration::ZERO,
            last: Instant::now(),
            longest: rank_timeout / 6,
        }))
    }

    /// The time that the process ran since the clock was made.
    pub(super) fn now(&self) -> Duration {
        self.lock().now()
    }

    /// Goes on and returns the time.
    pub(super) fn tick(&self) -> Duration {
        let mut ticks = self.lock();
        ticks.run = ticks.now();
        ticks.last = Instant::now();
        ticks.run
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Ticks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
