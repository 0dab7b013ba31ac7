//! The program `candle-train` with its subcommands.
//!
//! A program of one's own takes [`parse`] and the flags it wants, such as [`RankArgs`](candle_train_run::RankArgs); one that is a training
//! run with other defaults takes [`run_with_flags`].
#![deny(unsafe_code)]

mod arguments;
mod commands;
mod pictures;
mod program;

pub use arguments::flags::parse;
pub use program::{candle_train, command, run_with_flags};
