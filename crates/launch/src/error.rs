//! What can go wrong between processes, as sentences for the user.

/// An error of this crate. Each is a sentence: what, where, expected, got; a last line `hint:` where the reader can act.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment variables do not say who this process is.
    #[error("{0}")]
    Environment(String),

    /// The launcher cannot start a run.
    #[error("{0}")]
    Launch(String),

    /// This rank could not join the run.
    #[error("{0}")]
    Join(String),

    /// The run cannot start, on any rank. All ranks have this error; it is enough if rank 0 shows it.
    #[error("{0}")]
    CannotStart(String),

    /// The run ended because a rank died, failed or was late; see [`Control::failure`](crate::Control::failure).
    #[error("{}", .0.message)]
    RunFailed(crate::Failure),

    /// A request to the other ranks that cannot be met.
    #[error("{0}")]
    Control(String),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
