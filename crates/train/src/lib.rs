//! Configuration, data, schedules, metrics and the trainer.
//!
//! Data flows one way: [`Documents`] -> [`Tokens`] -> [`Samples`] -> [`Batches`] -> micro-batches. Beside it stand what a
//! run needs around its steps: [`hub`], [`Tokenizer`], [`LrSchedule`], [`Metrics`], [`TensorBoard`], [`Progress`] and [`Sampler`].

#![forbid(unsafe_code)]

pub mod hub;

mod activity;
mod batches;
mod checkpoints;
mod documents;
mod eval_batches;
mod evaluation;
mod generate;
mod held_out;
mod lr_schedule;
mod memory_report;
mod metrics;
mod model_flops;
mod progress;
mod sample_order;
mod sampler;
mod samples;
mod special_tokens;
mod step_metrics;
mod step_times;
mod tensorboard;
mod tokenizer;
mod tokens;
mod train_bpe;
mod train_config;
mod trainer;
mod training_record;

pub use activity::Activity;
pub use batches::{BatchConfig, Batches};
pub use checkpoints::Checkpoints;
pub use documents::Documents;
pub use eval_batches::EvalBatches;
pub use evaluation::{EvalHistory, EvalMetrics, Evaluation};
pub use generate::{GenerateConfig, generate};
pub use held_out::held_out;
pub use lr_schedule::{LrDecay, LrSchedule};
pub use memory_report::{explain_out_of_memory, held_in_words, peaks_in_words};
pub use metrics::{Metrics, MetricsLine};
pub use model_flops::ModelFlops;
pub use progress::Progress;
pub use sampler::{Sampler, SamplingConfig};
pub use samples::Samples;
pub use step_metrics::StepMetrics;
pub use step_times::StepTimes;
pub use tensorboard::TensorBoard;
pub use tokenizer::Tokenizer;
pub use tokens::Tokens;
pub use train_config::TrainConfig;
pub use trainer::{TrainEvent, Trainer};
pub use training_record::{DataPosition, TrainingRecord};
