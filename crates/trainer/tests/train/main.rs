//! Tests of what is around a trainer's steps, one module per part.

mod lr_schedule;
mod metrics;
mod progress;
mod sampler;
mod tensorboard;

/// The error's text, which must contain all of `parts`.
#[track_caller]
fn assert_error<T>(result: candle_core::Result<T>, parts: &[&str]) {
    let message = match result {
        Ok(_) => panic!("expected an error that mentions {parts:?}"),
        Err(e) => e.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
