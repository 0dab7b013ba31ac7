//! Configuration, data, schedules, metrics and the trainer.
//!
//! Data flows one way: [`Data`] -> [`Tokens`] -> [`Samples`] -> [`Batches`] -> micro-batches. Beside it stand what a
//! run needs around its steps: [`hub`], [`Tokenizer`], [`ChatTemplate`], [`LrSchedule`], [`Metrics`], [`TensorBoard`], [`Tracer`], [`Progress`] and [`Sampler`].

#![forbid(unsafe_code)]

pub mod hub;

mod activity;
mod available_memory;
mod batches;
mod chat;
mod checkpoints;
mod counted;
mod data;
mod eval_batches;
mod evaluation;
mod few;
mod file_format;
mod first_fit;
mod generate;
mod gguf;
mod guarded;
mod held_out;
mod json_file;
mod json_text;
mod line_borders;
mod loss_range;
mod lr_schedule;
mod memory_report;
mod metrics;
mod model_flops;
mod parameter_server;
mod progress;
mod record_error;
mod rows;
mod sample_config;
mod sample_order;
mod sampler;
mod samples;
mod special_tokens;
mod step_debug;
mod step_metrics;
mod step_times;
mod tensorboard;
mod text_growth;
mod tokenizer;
mod tokenizer_config;
mod tracer;
mod train_bpe;
mod train_config;
mod trainer;
mod training_data;
mod training_record;

pub use activity::Activity;
pub use batches::{BatchConfig, BatchRamp, Batches};
pub use candle_parallel::checkpoint::WholeFile;
pub use chat::{Chat, ChatTemplate, Rendered, TemplateFit, TemplateKwargs};
pub use checkpoints::Checkpoints;
pub use counted::counted;
pub use data::{
    Columns, Data, DataReport, DataSpec, EncodedRecord, EncoderConfig, Overlong, Record,
    RecordEncoder, RecordFormat, RecordKind, SkippedRecords, TokenCache, Tokens,
};
pub use eval_batches::EvalBatches;
pub use evaluation::{EvalHistory, EvalMetrics, Evaluation};
pub use generate::{GenerateConfig, generate};
pub use gguf::{GgufVocab, gguf_vocab};
pub use loss_range::{LossHistory, LossRange};
pub use lr_schedule::{LrDecay, LrSchedule};
pub use memory_report::{
    LESS_MEMORY_HINT, check_memory, explain_out_of_memory, memory_in_words, memory_left,
    peaks_in_words,
};
pub use metrics::{Metrics, MetricsLine};
pub use model_flops::ModelFlops;
pub use parameter_server::{Consistency, ParameterServer, Staleness, Worker};
pub use progress::Progress;
pub use record_error::RecordError;
pub use sample_config::SampleConfig;
pub use sampler::{Sampler, SamplingConfig};
pub use samples::{Sample, Samples};
pub use step_metrics::StepMetrics;
pub use step_times::StepTimes;
pub use tensorboard::TensorBoard;
pub use tokenizer::Tokenizer;
pub use tracer::Tracer;
pub use train_config::TrainConfig;
pub use trainer::{TrainEvent, Trainer};
pub use training_data::{Filling, TrainingData};
pub use training_record::{DataPosition, TrainingRecord};
