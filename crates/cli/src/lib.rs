//! The command line: the flags of a training run, the run itself, and the program `candle-train` with its subcommands.
//!
//! A program of one's own takes [`parse`] and the flags it wants, such as [`RankArgs`]; one that only has other defaults takes
//! [`run_with_defaults`].
#![deny(unsafe_code)]

mod adapter_base;
mod allocator;
mod announcement;
mod best_weights;
mod chat;
mod checkpoint_args;
mod choices;
mod config_file;
mod context_args;
mod counting_allocator;
mod data_args;
mod defaults;
mod end;
mod env;
mod eval_args;
mod export;
mod finetune;
mod fingerprint;
mod fit;
mod flags;
mod flags_of_others;
mod freeze;
mod generate;
mod generation_config;
mod idle_flags;
mod inspect;
mod inspect_model;
mod launch;
mod log_args;
mod lora_args;
mod loss_scale;
mod merge;
mod number;
mod output;
mod parameter_server;
mod picture;
mod pipeline_args;
mod plot;
mod pretrain;
mod preview;
mod preview_text;
mod program;
mod rank_args;
mod resuming;
mod run_name;
mod run_record;
mod samples;
mod save_args;
mod saving;
mod schedule;
mod sequence_args;
mod short_help;
mod spellings;
mod stop;
mod strategy_args;
mod timeline;
mod trace_args;
mod training_args;
mod training_run;
mod without_effect;

pub use allocator::{ALLOCATOR, Allocator, keep_freed_memory};
pub use choices::{DTypeChoice, RecomputeChoice, ScheduleChoice, StorageChoice};
pub use context_args::{ContextArgs, ContextMethodChoice};
pub use counting_allocator::{CountingAllocator, peak_allocated_bytes};
pub use finetune::Finetune;
pub use fingerprint::fingerprint_of_program;
pub use flags::{Flags, parse};
pub use freeze::FreezeArgs;
pub use loss_scale::LossScaleArgs;
pub use output::{exit_as_rank, exit_with};
pub use pipeline_args::{PipelineArgs, ScheduleArgs, StageLayers};
pub use pretrain::Pretrain;
pub use program::{
    FlagDefault, TrainingCommand, candle_train, command, parse_with_defaults, run_with_defaults,
};
pub use rank_args::RankArgs;
pub use samples::SampleArgs;
pub use training_args::{LayoutArgs, TrainingArgs};
