//! Tests of what is around a trainer's steps, one module per part.

#[path = "train/lr_schedule.rs"]
mod lr_schedule;
#[path = "train/metrics.rs"]
mod metrics;
#[path = "train/progress.rs"]
mod progress;
#[path = "train/sampler.rs"]
mod sampler;
#[path = "train/tensorboard.rs"]
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
