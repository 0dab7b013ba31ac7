//! What a backend is told of a call beside its arguments: where in the user's code it was made, and the ticket by which the run's
//! control plane knows it.
//!
//! `#[track_caller]` does not pass through a `dyn` call, so [`ProcessGroup`](crate::ProcessGroup) notes the location
//! for the duration of its call into the backend, and the backend reads it here.

use std::cell::{Cell, RefCell};
use std::panic::Location;

use candle_launch::Ticket;

thread_local! {
    static SITE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
    static TICKET: RefCell<Option<Ticket>> = const { RefCell::new(None) };
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

/// Calls `run` with a ticket that the backend may [take](take_ticket), if the operation lasts longer than the wait for it does;
/// returns the ticket if it has not.
pub(crate) fn offer<R>(ticket: Ticket, run: impl FnOnce() -> R) -> (R, Option<Ticket>) {
    /// Takes the ticket back, also when `run` panics.
    struct Withdraw;
    impl Drop for Withdraw {
        fn drop(&mut self) {
            drop(TICKET.take());
        }
    }
    TICKET.set(Some(ticket));
    let _withdraw = Withdraw;
    let value = run();
    (value, TICKET.take())
}

/// The ticket of the operation that is being started, for a backend that drops it when the operation is complete.
#[cfg(feature = "nccl")]
pub(crate) fn take_ticket() -> Option<Ticket> {
    TICKET.take()
}
