//! Ranks that meet, talk, and notice when one is gone.

mod exchange;
mod ranks;
