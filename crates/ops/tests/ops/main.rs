//! The fused operations against plain f64 loops, their determinism, their graphs and their errors.

mod attention;
mod attention_narrow;
mod attention_of_parts;
mod attention_reference;
mod check;
mod cross_entropy;
mod determinism;
mod device_choice;
mod elementwise;
mod embedding;
mod errors;
mod half_precision;
mod host_copies;
mod kernel_signatures;
mod layer_norm;
mod linear;
mod optimizer;
mod pieces;
mod product_choice;
mod profile;
mod quantized;
mod rms_norm;
mod size_zero;
mod tracking;
mod upload;
mod with_backward;
