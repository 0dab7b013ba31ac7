//! Connections that have not shown yet that they know the run's secret.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many there may be beyond the world size.
const SPARE: usize = 256;

/// Connections that have not shown yet that they know the run's secret. When there are too many the oldest is closed: a rank
/// takes a moment to show it, and however many others come, they do not keep it out.
pub(crate) struct Strangers {
    max: usize,
    /// With the number that each of them has.
    waiting: Mutex<VecDeque<(u64, TcpStream)>>,
}

impl Strangers {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            max: world_size.saturating_add(SPARE),
            waiting: Mutex::default(),
        }
    }

    pub(crate) fn add(&self, number: u64, stream: TcpStream) {
        let mut waiting = self.lock();
        waiting.push_back((number, stream));
        if waiting.len() > self.max
            && let Some((_, oldest)) = waiting.pop_front()
        {
            // Nothing to do about one that is closed already.
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    /// It is none any more.
    pub(crate) fn remove(&self, number: u64) {
        self.lock().retain(|(other, _)| *other != number);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
