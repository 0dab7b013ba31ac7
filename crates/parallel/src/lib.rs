//! Parallel layers, tape, pipeline, gradients, ZeRO optimizer and checkpoints for candle.
#![forbid(unsafe_code)]

mod micro_batch;

pub use micro_batch::MicroBatch;
