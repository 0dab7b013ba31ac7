//! A run as a value: what it is made of, as flags, as TOML and as a struct, and what it does.
#![deny(unsafe_code)]
// The help of a flag has brackets that are no links, and addresses: `org/name[@revision]`.
#![allow(rustdoc::broken_intra_doc_links, rustdoc::bare_urls)]

mod args;
mod config_file;
mod dry_run;
mod export;
mod flags;
mod memory;
mod output;
mod reading;
mod record;
mod run;
mod spec;
mod start;
mod training_run;

pub use args::batches::BatchArgs;
pub use args::checkpoints::CheckpointArgs;
pub use args::choices::{
    GradientQuantization, LrScheduleChoice, PackChoice, Quantization, RecomputeChoice, float_type,
};
pub use args::context::ContextArgs;
pub use args::data::DataArgs;
pub use args::evaluation::EvalArgs;
pub use args::freeze::FreezeArgs;
pub use args::layout::LayoutArgs;
pub use args::logs::LogArgs;
pub use args::lora::{LoraArgs, other_forms};
pub use args::loss_scale::LossScaleArgs;
pub use args::number::{num_bytes, real, whole, written};
pub use args::optimizer::OptimizerArgs;
pub use args::output::OutputArgs;
pub use args::pipeline::{PipelineArgs, ScheduleArgs, StageLayers, comma_list};
pub use args::ranks::RankArgs;
pub use args::samples::SampleArgs;
pub use args::sequences::{SequenceArgs, default_seq_len};
pub use args::strategy::{StrategyArgs, StrategyChoice};
pub use args::trace::TraceArgs;
pub use args::training::TrainingArgs;
pub use config_file::{CONFIG_FILE, read_table};
pub use dry_run::DryRun;
pub use export::generation_config::{GENERATION_FILE, GenerationFile};
pub use export::gguf::{GgufExport, GgufSource};
pub use flags::idle::Idle;
pub use flags::{Layer, find, numbers_may_be_negative, parse_layers};
pub use memory::allocator::{ALLOCATOR, Allocator, keep_freed_memory, return_freed_memory};
pub use memory::counting_allocator::{
    CountingAllocator, peak_allocated_bytes, peak_bytes_of, rank_allocated_bytes,
};
pub use output::observer::{Console, Observer, Observers, RunEvent};
pub use output::{
    check_printed, exit_as_rank, exit_with, in_words, keep_printed, print_error, print_for_all,
    print_line, print_message, print_note,
};
pub use reading::{DataModel, TrainingData};
pub use record::{WEIGHTS, digest_of_weights};
pub use run::{Run, flat};
pub use spec::RunSpec;
pub use start::adapter_base::{
    NamedModel, base_of, check_base, is_adapter, refuse_adapter, resolve_base,
};
pub use start::finetune::{Finetune, FromCheckpoint};
pub use start::pretrain::{FromScratch, ModelArgs, Pretrain};
pub use start::{Start, start_model::StartModel};
pub use training_run::fingerprint::fingerprint_of_program;
pub use training_run::stop::Stop;
pub use training_run::{Trained, TrainingRun};
