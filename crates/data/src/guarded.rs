//! Libraries that panic where a file is damaged or hostile.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use candle_core::{Error, Result};

thread_local! {
    /// Whether a panic of this thread is caught and becomes an error.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of another library on what a file says. A panic there is an error with its message, and prints nothing.
///
/// After an error nothing that `run` had under its hands is used any more.
pub(crate) fn guarded<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_GUARDED.get() {
                print(info);
            }
        }));
    });
    let was_guarded = IS_GUARDED.replace(true);
    let ran = catch_unwind(AssertUnwindSafe(run));
    IS_GUARDED.set(was_guarded);
    ran.unwrap_or_else(|panic| Err(Error::msg(message(panic.as_ref()))))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let literal = panic.downcast_ref::<&str>().map(ToString::to_string);
    let formatted = panic.downcast_ref::<String>().cloned();
    let message = literal.or(formatted).unwrap_or_default();
    format!("the library that reads it panicked: {message}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_and_the_next_one_is_caught_too() {
        for _ in 0..2 {
            let nested = guarded(|| {
                let inner: Result<()> = guarded(|| panic!("index {} of 3", 5));
                Ok((inner, IS_GUARDED.get()))
            });
            let (inner, is_guarded) = nested.unwrap();
            let expected = "the library that reads it panicked: index 5 of 3";
            assert!(inner.unwrap_err().to_string().starts_with(expected));
            assert!(is_guarded && !IS_GUARDED.get());
        }
    }
}
