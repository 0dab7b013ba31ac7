//! What an error says to people.

use candle_core::Error;

/// The sentences of an error without the backtraces that candle adds when RUST_BACKTRACE is set: outermost context first,
/// one line each.
pub fn message_of(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => message_of(inner),
        Error::Context { inner, context } => format!("{context}\n{}", message_of(inner)),
        Error::WithPath { inner, path } => format!("path: {path:?} {}", message_of(inner)),
        other => other.to_string(),
    }
}
