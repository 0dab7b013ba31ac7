//! Locks whose data is sound whatever has panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is in a mutex. No code of this crate panics while it holds one half changed.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
