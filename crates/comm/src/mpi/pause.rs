//! What MPI's thread does between idle polls: it yields a while, then it sleeps ever longer.

use std::thread::yield_now;
use std::time::{Duration, Instant};

/// Idle polls before the thread sleeps: enough for the answer of another process on the same host.
const NUM_SPINS: u32 = 200;

/// A sleep lasts this part of the time that has been waited, so it makes a wait longer by no more than that.
const PART_OF_WAIT: u32 = 64;

/// The shortest and the longest sleep.
const SLEEPS: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A pause that started when something moved last.
pub(super) struct Pause {
    num_spins: u32,
    start: Instant,
}

impl Pause {
    pub fn new() -> Self {
        Self {
            num_spins: 0,
            start: Instant::now(),
        }
    }

    /// How long to sleep now; `None` after it has yielded.
    pub fn next(&mut self) -> Option<Duration> {
        if self.num_spins < NUM_SPINS {
            self.num_spins += 1;
            yield_now();
            return None;
        }
        let (shortest, longest) = SLEEPS;
        Some((self.start.elapsed() / PART_OF_WAIT).clamp(shortest, longest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_spins_then_sleeps_in_proportion() {
        let mut pause = Pause::new();
        assert!((0..NUM_SPINS).all(|_| pause.next().is_none()));
        assert!(pause.next().is_some_and(|sleep| sleep >= SLEEPS.0));
        pause.start -= Duration::from_secs(1);
        assert_eq!(pause.next(), Some(SLEEPS.1));
    }
}
