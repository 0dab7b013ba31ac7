//! The time that this process ran.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A pause between two ticks counts as no more than this.
const LONGEST_TICK: Duration = Duration::from_secs(1);

/// A clock that stands still while the process is stopped (SIGSTOP, Ctrl-Z, a suspended machine): that time is no time
/// for which other ranks were silent or late. It runs on [`tick`](Self::tick), to be called more than once a second.
pub(super) struct RunClock(Mutex<Ticks>);

struct Ticks {
    run: Duration,
    last: Instant,
}

impl Ticks {
    fn now(&self) -> Duration {
        self.run + self.last.elapsed().min(LONGEST_TICK)
    }
}

impl RunClock {
    pub(super) fn new() -> Self {
        let last = Instant::now();
        Self(Mutex::new(Ticks {
            run: Duration::ZERO,
            last,
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
