//! The subcommands but those that train.

pub(crate) mod chat;
pub(crate) mod env;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod inspect_model;
pub(crate) mod merge;
pub(crate) mod preview;
pub(crate) mod preview_text;
pub(crate) mod schedule;
pub(crate) mod writer;
