//! Configuration, data, schedules, metrics and the trainer.
//!
//! Data flows one way: [`Data`] -> [`Tokens`] -> [`Samples`] -> [`Batches`] -> micro-batches. Beside it stand what a
//! run needs around its steps: [`hub`], [`Tokenizer`], [`ChatTemplate`], [`LrSchedule`], [`Metrics`], [`Progress`] and [`Sampler`].

#![forbid(unsafe_code)]

pub mod hub;

mod batches;
mod chat;
mod checkpoints;
mod data;
mod first_fit;
mod generate;
mod json_file;
mod lr_schedule;
mod memory_report;
mod metrics;
mod progress;
mod sample_config;
mod sample_order;
mod sampler;
mod samples;
mod special_tokens;
mod step_metrics;
mod step_times;
mod tokenizer;
mod tokenizer_config;
mod train_bpe;
mod train_config;
mod trainer;
mod training_record;

pub use batches::{BatchConfig, Batches};
pub use chat::{Chat, ChatTemplate, Rendered};
pub use checkpoints::Checkpoints;
pub use data::{
    Data, DataReport, DataSpec, EncodedRecord, Overlong, Record, RecordEncoder, RecordFormat,
    RecordKind, SkippedRecord, Tokens,
};
pub use generate::{GenerateConfig, generate};
pub use lr_schedule::LrSchedule;
pub use memory_report::{explain_out_of_memory, peaks_in_words};
pub use metrics::Metrics;
pub use progress::Progress;
pub use sample_config::SampleConfig;
pub use sampler::{Sampler, SamplingConfig};
pub use samples::{Sample, Samples};
pub use step_metrics::StepMetrics;
pub use step_times::StepTimes;
pub use tokenizer::Tokenizer;
pub use train_config::TrainConfig;
pub use trainer::Trainer;
pub use training_record::{DataPosition, TrainingRecord};
