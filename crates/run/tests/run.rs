//! Tests of runs as values.

#[path = "run/config.rs"]
mod config;
