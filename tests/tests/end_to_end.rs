//! End-to-end tests: small checkpoints trained on every layout, against PyTorch's numbers and against one rank.

/// What a rank has allocated is counted, for the memory of activations.
#[global_allocator]
static ALLOCATOR: candle_train_run::Allocator = candle_train_run::ALLOCATOR;

#[path = "end_to_end/device.rs"]
mod device;
#[path = "end_to_end/fixture.rs"]
mod fixture;
#[path = "end_to_end/half_precision.rs"]
mod half_precision;
#[path = "end_to_end/run.rs"]
mod run;
#[path = "end_to_end/tensors.rs"]
mod tensors;

#[path = "end_to_end/combinations.rs"]
mod combinations;
#[path = "end_to_end/context_parallel.rs"]
mod context_parallel;
#[path = "end_to_end/custom_data.rs"]
mod custom_data;
#[path = "end_to_end/degrees.rs"]
mod degrees;
#[path = "end_to_end/determinism.rs"]
mod determinism;
#[path = "end_to_end/documents.rs"]
mod documents;
#[path = "end_to_end/edge_cases.rs"]
mod edge_cases;
#[path = "end_to_end/evaluation.rs"]
mod evaluation;
#[path = "end_to_end/faults.rs"]
mod faults;
#[path = "end_to_end/frozen.rs"]
mod frozen;
#[path = "end_to_end/generating.rs"]
mod generating;
#[path = "end_to_end/halves.rs"]
mod halves;
#[path = "end_to_end/layouts.rs"]
mod layouts;
#[path = "end_to_end/lora.rs"]
mod lora;
#[path = "end_to_end/memory.rs"]
mod memory;
#[path = "end_to_end/memory_plan.rs"]
mod memory_plan;
#[path = "end_to_end/model_spec.rs"]
mod model_spec;
#[path = "end_to_end/packed_weights.rs"]
mod packed_weights;
#[path = "end_to_end/pairwise.rs"]
mod pairwise;
#[path = "end_to_end/parameter_server.rs"]
mod parameter_server;
#[path = "end_to_end/quantized.rs"]
mod quantized;
#[path = "end_to_end/readme.rs"]
mod readme;
#[path = "end_to_end/recompute.rs"]
mod recompute;
#[path = "end_to_end/reference.rs"]
mod reference;
#[path = "end_to_end/saving.rs"]
mod saving;
#[path = "end_to_end/schedules.rs"]
mod schedules;
#[path = "end_to_end/tape.rs"]
mod tape;
#[path = "end_to_end/what_fits.rs"]
mod what_fits;
