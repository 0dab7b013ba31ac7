//! Tests of runs as values.

#[path = "run/config.rs"]
mod config;
#[path = "run/library.rs"]
mod library;
#[path = "run/record.rs"]
mod record;
#[path = "run/spec.rs"]
mod spec;
