//! End-to-end tests: small checkpoints trained on every layout, against PyTorch's numbers and against one rank.

#[path = "end_to_end/fixture.rs"]
mod fixture;
#[path = "end_to_end/run.rs"]
mod run;
#[path = "end_to_end/tensors.rs"]
mod tensors;

#[path = "end_to_end/layouts.rs"]
mod layouts;
#[path = "end_to_end/reference.rs"]
mod reference;
