//! The fused operations against plain f64 loops, their determinism, their graphs and their errors.

#[path = "ops/attention.rs"]
mod attention;
#[path = "ops/attention_narrow.rs"]
mod attention_narrow;
#[path = "ops/attention_of_parts.rs"]
mod attention_of_parts;
#[path = "ops/attention_reference.rs"]
mod attention_reference;
#[path = "ops/check.rs"]
mod check;
#[path = "ops/cross_entropy.rs"]
mod cross_entropy;
#[path = "ops/determinism.rs"]
mod determinism;
#[path = "ops/device_choice.rs"]
mod device_choice;
#[path = "ops/elementwise.rs"]
mod elementwise;
#[path = "ops/embedding.rs"]
mod embedding;
#[path = "ops/errors.rs"]
mod errors;
#[path = "ops/half_precision.rs"]
mod half_precision;
#[path = "ops/host_copies.rs"]
mod host_copies;
#[path = "ops/kernel_signatures.rs"]
mod kernel_signatures;
#[path = "ops/layer_norm.rs"]
mod layer_norm;
#[path = "ops/linear.rs"]
mod linear;
#[path = "ops/optimizer.rs"]
mod optimizer;
#[path = "ops/pieces.rs"]
mod pieces;
#[path = "ops/product_choice.rs"]
mod product_choice;
#[path = "ops/profile.rs"]
mod profile;
#[path = "ops/quantized.rs"]
mod quantized;
#[path = "ops/rms_norm.rs"]
mod rms_norm;
#[path = "ops/size_zero.rs"]
mod size_zero;
#[path = "ops/tracking.rs"]
mod tracking;
#[path = "ops/upload.rs"]
mod upload;
#[path = "ops/with_backward.rs"]
mod with_backward;
