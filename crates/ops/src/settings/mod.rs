//! How this process computes, by what it was asked for, the environment and the processor.

pub(crate) mod attention_code;
pub(crate) mod gpu_settings;
pub(crate) mod matmul_precision;
pub(crate) mod product_choice;
