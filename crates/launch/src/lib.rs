//! Processes as ranks: who am I, starting the others, meeting them, and noticing when one is gone.

mod error;
mod rank_env;

pub use error::{Error, Result};
pub use rank_env::{RankEnv, StartedBy};
