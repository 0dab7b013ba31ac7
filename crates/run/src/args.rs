//! The parts of a run: flags of a command line, and sections of a file.

pub(crate) mod batches;
pub(crate) mod checkpoints;
pub(crate) mod choices;
pub(crate) mod context;
pub(crate) mod data;
pub(crate) mod evaluation;
pub(crate) mod freeze;
pub(crate) mod layout;
pub(crate) mod logs;
pub(crate) mod lora;
pub(crate) mod loss_scale;
pub(crate) mod number;
pub(crate) mod optimizer;
pub(crate) mod output;
pub(crate) mod pipeline;
pub(crate) mod ranks;
pub(crate) mod samples;
pub(crate) mod sequences;
pub(crate) mod strategy;
pub(crate) mod text;
pub(crate) mod trace;
pub(crate) mod training;
