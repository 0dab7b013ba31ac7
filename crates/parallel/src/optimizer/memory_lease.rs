//! How much of the state that is kept elsewhere is in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of all buckets that are in memory.
#[derive(Default)]
pub(super) struct Memory {
    now: AtomicUsize,
    peak: AtomicUsize,
}

/// The bytes of one of them.
pub(super) struct Lease {
    memory: Arc<Memory>,
    num_bytes: usize,
}

impl Lease {
    pub fn new(memory: &Arc<Memory>, num_bytes: usize) -> Self {
        let now = memory.now.fetch_add(num_bytes, Ordering::Relaxed) + num_bytes;
        memory.peak.fetch_max(now, Ordering::Relaxed);
        Self {
            memory: memory.clone(),
            num_bytes,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.memory.now.fetch_sub(self.num_bytes, Ordering::Relaxed);
    }
}

impl Memory {
    /// Now, and the most that it was.
    pub fn num_bytes(&self) -> (usize, usize) {
        let load = |bytes: &AtomicUsize| bytes.load(Ordering::Relaxed);
        (load(&self.now), load(&self.peak))
    }
}
