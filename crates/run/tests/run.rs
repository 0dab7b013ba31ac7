//! Tests of runs as values.

#[path = "run/config.rs"]
mod config;
#[path = "run/library.rs"]
mod library;
#[path = "run/spec.rs"]
mod spec;
