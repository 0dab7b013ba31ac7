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

use crate::flags::default_of;

/// Gives parts of a run the defaults of their flags.
macro_rules! with_defaults_of_flags {
    ($($part:ty),* $(,)?) => {
        $(impl Default for $part {
            fn default() -> Self {
                default_of()
            }
        })*
    };
}

with_defaults_of_flags! {
    batches::BatchArgs, checkpoints::CheckpointArgs, context::ContextArgs, data::DataArgs,
    evaluation::EvalArgs, freeze::FreezeArgs, layout::LayoutArgs, logs::LogArgs,
    loss_scale::LossScaleArgs, optimizer::OptimizerArgs, output::OutputArgs,
    pipeline::ScheduleArgs, pipeline::PipelineArgs, ranks::RankArgs, samples::SampleArgs,
    sequences::SequenceArgs, strategy::StrategyArgs, trace::TraceArgs, training::TrainingArgs,
}
