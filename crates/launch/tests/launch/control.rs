//! Ranks that meet, talk, and notice when one is gone.

mod deaths;
mod exchange;
mod processes;
mod ranks;
