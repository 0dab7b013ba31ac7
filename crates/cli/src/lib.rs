//! The program `candle-train` with its subcommands.
//!
//! A program of one's own takes [`parse`] and the flags it wants, such as [`RankArgs`](candle_train_run::RankArgs); one that is a training
//! run with other defaults takes [`run_with_flags`].
#![deny(unsafe_code)]

mod chat;
mod env;
mod export;
mod flags;
mod flags_of_others;
mod generate;
mod inspect;
mod inspect_model;
mod launch;
mod merge;
mod picture;
mod plot;
mod preview;
mod preview_text;
mod program;
mod schedule;
mod short_help;
mod spellings;
mod timeline;

pub use flags::parse;
pub use program::{candle_train, command, run_with_flags};
