//! Ranks that meet, talk, and notice when one is gone.

mod deaths;
mod exchange;
mod hosts;
mod in_flight;
mod processes;
mod ranks;
mod rendezvous;
mod slow_rank;
mod strangers;
