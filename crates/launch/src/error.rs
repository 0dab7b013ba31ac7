//! What can go wrong between processes, as sentences for the user.

/// An error of this crate. Each is a sentence: what, where, expected, got; a last line `hint:` where the reader can act.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The environment variables do not say who this process is.
    #[error("{0}")]
    Environment(String),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
