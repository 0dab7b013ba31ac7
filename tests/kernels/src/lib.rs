//! Runs the CUDA kernels of candle-ops on the CPU, from the same source, so that they are tested where no GPU is.
//!
//! The build compiles `crates/ops/kernels/*.cu` as C++. Each thread of a block has its own stack; threads change at
//! barriers and shuffles, in random order. Shared memory and buffers start as NaN, buffers have guard zones. What this
//! cannot show: speed, the rounding of the GPU's `expf` and `logf`, races that no order of whole steps reveals.

#![deny(unsafe_code)]

mod buffer;
mod launch;

pub use buffer::Buffer;
pub use launch::Launch;
