//! Model families built on the parallel layers.
#![forbid(unsafe_code)]

pub mod llama;
