//! Where in the user's code an operation was called.
//!
//! `#[track_caller]` does not pass through a `dyn` call, so [`ProcessGroup`](crate::ProcessGroup) notes the location
//! for the duration of its call into the backend, and the backend reads it here.

use std::cell::Cell;
use std::panic::Location;

thread_local! {
    static SITE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

/// Puts the outer location back, also when `run` panics.
struct Restore(Option<&'static Location<'static>>);

impl Drop for Restore {
    fn drop(&mut self) {
        SITE.set(self.0);
    }
}

/// Calls `run` with `site` as the location that [`current`] returns on this thread.
pub(crate) fn scope<R>(site: &'static Location<'static>, run: impl FnOnce() -> R) -> R {
    let _restore = Restore(SITE.replace(Some(site)));
    run()
}

/// The location noted by the innermost [`scope`], or else the caller's.
#[track_caller]
pub(crate) fn current() -> &'static Location<'static> {
    SITE.get().unwrap_or_else(|| Location::caller())
}
