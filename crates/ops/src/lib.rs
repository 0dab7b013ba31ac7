//! Differentiable fused operations that candle lacks.
//!
//! Every operation here has a forward that touches memory once and a hand-written backward, both on all cores and
//! both giving the same bits for any number of threads: work is cut into chunks that depend on the shape alone, and
//! partial sums are added in chunk order. Inputs are tensors of f32, bf16 or f16, all of one dtype and on one device; anything
//! else is an error that names the operation, the device and the dtype. The arithmetic is that of f32 for all: bf16 and f16 are
//! widened when they are read, and the result is rounded once, to the dtype of the inputs; attention in bf16 multiplies with probabilities
//! in bf16 where the processor has such products. Losses, log-sum-exps, angles and
//! the gradients that `.._into` writes are always f32. Linear layers of f32 multiply as [`MatmulPrecision`] says, and all products on the CPU as [`ProductChoice`] does. Gradients are computed only for the inputs candle tracks. [`quantize_rows`]
//! packs values for their way between ranks, with the same bits on every device.
//!
//! With the feature `cuda` the same functions work on tensors on a GPU, by kernels of this crate and cuBLAS, on the
//! device's one stream and without waiting for it. They sum in orders of their own, which depend on the shapes alone, so
//! bits differ from the CPU's, but not from run to run; sums of several products (`linear_input_grad_sum`) are rounded
//! after each. Only cuDNN's backward pass of attention, in bf16 or f16 with the feature `cudnn`, adds in no fixed order, unless
//! [`GpuSettings::deterministic`] is set.
//!
//! Each operation comes twice, made of the same code: differentiable in candle's graph (`rms_norm`), and as functions
//! on detached tensors for blocks with a backward of their own (`rms_norm_forward`, `rms_norm_backward`, and
//! `.._into` where a gradient goes straight into a buffer that exists). A function that writes to a tensor holds the lock of its
//! storage while all threads work: two such calls on views of one storage must not be jobs of one rayon pool.

#![deny(unsafe_code)]

mod adamw;
mod attention;
mod attention_blocks;
mod attention_code;
mod attention_merge;
#[cfg(any(test, feature = "cudnn"))]
mod attention_rectangle;
mod attention_spec;
mod awake;
mod blocks;
mod chunks;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
mod device_choice;
mod dispatch;
mod document_starts;
mod element;
mod elements;
mod embedding;
mod exp;
mod few_rows;
mod filled;
mod gated;
mod gpu_settings;
mod gpu_state;
mod half_precision;
mod head_groups;
mod host;
mod host_copies;
mod host_floats;
mod in_place;
mod lanes;
mod layer_norm;
mod linear;
mod linear_grad;
mod lines;
mod mapped;
mod master_remainder;
mod matmul_precision;
mod matrix;
mod matrix_product;
mod op_output;
mod op_timer;
mod op_times;
mod packed;
mod packed_weight;
mod processor;
#[cfg(target_arch = "x86_64")]
mod product;
mod product_choice;
#[cfg(target_arch = "x86_64")]
mod product_lanes;
mod profile;
mod quantized;
mod rms_norm;
mod rope;
mod row_norm;
mod runs;
mod stopwatch;
mod sums;
mod upload;
mod vector;
mod vectorised;
mod vocab_shard;
mod with_backward;

pub use adamw::{AdamWBuffers, AdamWConstants, AdamWSlot, adamw};
pub use attention::{
    attention_backward, attention_backward_of_part, attention_delta, attention_forward,
    attention_of_part, causal_attention,
};
pub use attention_code::AttentionCode;
pub use attention_merge::merge_attention;
pub use attention_spec::{AttentionGrad, AttentionSpec};
pub use cross_entropy::cross_entropy;
pub use device_choice::DeviceChoice;
pub use document_starts::DocumentStarts;
pub use elements::{add_into, round_into};
pub use embedding::{embedding, embedding_forward, embedding_grad_into};
pub use gated::{
    geglu_backward, geglu_backward_and_output, geglu_forward, swiglu, swiglu_backward,
    swiglu_backward_and_output, swiglu_forward,
};
pub use gpu_settings::GpuSettings;
pub use gpu_state::GpuState;
pub use head_groups::HeadGroups;
pub use host_copies::{HostBuffer, HostCopies, HostCopy};
pub use layer_norm::{layer_norm, layer_norm_backward, layer_norm_forward};
pub use linear::{HeldRows, linear, linear_forward, linear_forward_add, linear_of_few_rows};
pub use linear_grad::{
    linear_bias_grad, linear_bias_grad_into, linear_input_grad, linear_input_grad_sum,
    linear_weight_grad, linear_weight_grad_into,
};
pub use master_remainder::{join_master, split_master};
pub use matmul_precision::MatmulPrecision;
pub use op_output::OpOutput;
pub use packed_weight::{LinearWeight, PackedWeight};
pub use product_choice::{ProductChoice, ProductSize};
pub use profile::{OpTime, Profile};
pub use quantized::{
    QuantizedType, dequantize_rows_into, dequantize_sum_into, quantize_rows,
    quantize_rows_transposed,
};
pub use rms_norm::{rms_norm, rms_norm_backward, rms_norm_forward};
pub use rope::{RopeDirection, rope, rope_in_place};
pub use runs::{AttentionRows, Run, Runs};
pub use stopwatch::Stopwatch;
pub use sums::{sum_into, sum_of_squares, sum_of_squares_into};
pub use upload::upload;
pub use vocab_shard::{
    cross_entropy_grad, cross_entropy_grad_in_place, cross_entropy_loss, softmax_stats,
};
pub use with_backward::with_backward;

/// Target id that marks a position without a target: it adds nothing to the loss and gets no gradient.
pub const IGNORE_INDEX: u32 = u32::MAX;
