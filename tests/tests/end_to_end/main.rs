//! End-to-end tests: small checkpoints trained on every layout, against PyTorch's numbers and against one rank.

/// What a rank has allocated is counted, for the memory of activations.
#[global_allocator]
static ALLOCATOR: candle_train_run::Allocator = candle_train_run::ALLOCATOR;

mod device;
mod fixture;
mod half_precision;
mod run;
mod tensors;

mod combinations;
mod context_parallel;
mod custom_data;
mod degrees;
mod determinism;
mod documents;
mod edge_cases;
mod evaluation;
mod faults;
mod frozen;
mod generating;
mod halves;
mod layouts;
mod lora;
mod memory;
mod memory_plan;
mod model_spec;
mod packed_weights;
mod pairwise;
mod parameter_server;
mod quantized;
mod readme;
mod recompute;
mod reference;
mod saving;
mod schedules;
mod tape;
mod what_fits;
