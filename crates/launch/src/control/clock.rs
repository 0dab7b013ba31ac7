//! The time that this process ran.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::lock::lock;

/// A clock that stands still while the process is stopped (SIGSTOP, Ctrl-Z, a suspended machine): that time is no time
/// for which other ranks were silent or late. It runs on [`tick`](Self::tick), to be called more often than the longest tick.
pub(super) struct RunClock {
    /// A pause between two ticks counts as no more than this.
    longest: Duration,
    /// The time at the last tick, and when that was.
    ticked: Mutex<(Duration, Instant)>,
}

impl RunClock {
    /// A clock for ranks that are taken for dead after this time: of a pause it counts no more than a sixth of that.
    pub(super) fn new(rank_timeout: Duration) -> Self {
        Self {
            longest: rank_timeout / 6,
            ticked: Mutex::new((Duration::ZERO, Instant::now())),
        }
    }

    /// The time that the process ran since the clock was made.
    pub(super) fn now(&self) -> Duration {
        let (time, last) = *lock(&self.ticked);
        time + last.elapsed().min(self.longest)
    }

    /// Goes on and returns the time.
    pub(super) fn tick(&self) -> Duration {
        let mut ticked = lock(&self.ticked);
        let now = ticked.0 + ticked.1.elapsed().min(self.longest);
        *ticked = (now, Instant::now());
        now
    }
}
