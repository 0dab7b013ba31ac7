//! Sequences of tokens that a model is trained and evaluated on: [`Samples`], and [`Batches`] of them.

mod batches;
mod eval_batches;
mod first_fit;
mod micro_batch;
mod sample_config;
mod sample_order;
mod samples;
mod training_data;

pub use batches::{BatchConfig, BatchRamp, Batches};
pub use eval_batches::EvalBatches;
pub use sample_config::{Overlong, SampleConfig};
pub use samples::{Sample, Samples};
pub use training_data::{DataPosition, Filling, TrainingData};
