//! Tests of runs as values.

mod config;
mod library;
mod record;
mod spec;
