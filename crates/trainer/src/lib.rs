//! Schedules, metrics, checkpoints, evaluation and the trainer.
//!
//! What a trainer takes its micro-batches from is in [`candle_data`], all of which is here, too. Beside the steps stand [`LrSchedule`],
//! [`Evaluation`], [`Checkpoints`], [`Metrics`], [`TensorBoard`], [`Tracer`], [`Progress`] and [`Sampler`].

#![forbid(unsafe_code)]

mod checkpoints;
mod evaluation;
mod generation;
mod logs;
mod loss_range;
mod lr_schedule;
mod memory;
mod parameter_server;
mod tracer;
mod train_config;
mod trainer;
mod training_record;

pub use candle_data::{
    Activity, BatchConfig, BatchRamp, Batches, Chat, ChatTemplate, Columns, Data, DataPosition,
    DataReport, DataSpec, EncodedRecord, EncoderConfig, EvalBatches, Filling, GgufVocab, Overlong,
    Record, RecordEncoder, RecordError, RecordFormat, RecordKind, Rendered, Sample, SampleConfig,
    Samples, SkippedRecords, TemplateFit, TemplateKwargs, TokenCache, Tokenizer, Tokens,
    TrainingData, counted, gguf_vocab, hub,
};
pub use candle_parallel::checkpoint::WholeFile;
pub use checkpoints::Checkpoints;
pub use evaluation::{EvalHistory, EvalMetrics, Evaluation};
pub use generation::{GenerateConfig, Sampler, SamplingConfig, generate};
pub use logs::{Metrics, MetricsLine, ModelFlops, Progress, StepMetrics, StepTimes, TensorBoard};
pub use loss_range::{LossHistory, LossRange};
pub use lr_schedule::{LrDecay, LrSchedule};
pub use memory::{
    LESS_MEMORY_HINT, check_memory, explain_out_of_memory, memory_in_words, memory_left,
    peaks_in_words,
};
pub use parameter_server::{Consistency, ParameterServer, Staleness, Worker};
pub use tracer::Tracer;
pub use train_config::TrainConfig;
pub use trainer::{TrainEvent, Trainer};
pub use training_record::TrainingRecord;
