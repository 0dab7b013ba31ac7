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
//!
//! # Device twins
//!
//! An operation in `x.rs` that has kernels of its own for GPUs has a twin beside it, in a file that ends in `_gpu.rs`. The public function checks shapes, then goes there
//! by `on_cuda!` if its tensors are on a GPU; the twin checks dtypes, device and layouts. What twins have in common, kernels and how they are launched, is in `cuda`.
//! All are tested on an emulated GPU, with the kernels compiled for the CPU, and on an H100 (`docs/gpu/RESULTS.md`).

#![deny(unsafe_code)]

mod attention;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod elementwise;
mod embedding;
mod host;
mod linear;
mod loss;
mod norm;
mod product;
mod settings;
mod timing;
mod update;

pub use attention::causal::{
    attention_backward, attention_backward_of_part, attention_delta, attention_forward,
    attention_of_part, causal_attention,
};
pub use attention::document_starts::DocumentStarts;
pub use attention::head_groups::HeadGroups;
pub use attention::merge::merge_attention;
pub use attention::runs::{AttentionRows, Run, Runs};
pub use attention::spec::{AttentionGrad, AttentionSpec};
pub use device::device_choice::DeviceChoice;
pub use device::gpu_state::GpuState;
pub use device::host_copies::{HostBuffer, HostCopies, HostCopy};
pub use device::profile::Profile;
pub use device::stopwatch::Stopwatch;
pub use device::upload::upload;
pub use elementwise::elements::{add_into, round_into};
pub use elementwise::gated::{
    geglu_backward, geglu_backward_and_output, geglu_forward, swiglu, swiglu_backward,
    swiglu_backward_and_output, swiglu_forward,
};
pub use elementwise::quantized::{
    QuantizedType, dequantize_rows_into, dequantize_sum_into, quantize_rows,
    quantize_rows_transposed,
};
pub use elementwise::rope::{RopeDirection, rope, rope_in_place};
pub use embedding::lookup::{embedding, embedding_forward, embedding_grad_into};
pub use host::op_output::OpOutput;
pub use host::with_backward::with_backward;
pub use linear::forward::{
    HeldRows, linear, linear_forward, linear_forward_add, linear_of_few_rows,
};
pub use linear::grad::{
    linear_bias_grad, linear_bias_grad_into, linear_input_grad, linear_input_grad_sum,
    linear_weight_grad, linear_weight_grad_into,
};
pub use linear::weight::LinearWeight;
pub use loss::cross_entropy::cross_entropy;
pub use loss::vocab_shard::{
    IGNORE_INDEX, cross_entropy_grad, cross_entropy_grad_in_place, cross_entropy_loss,
    softmax_stats,
};
pub use norm::layer_norm::{layer_norm, layer_norm_backward, layer_norm_forward};
pub use norm::rms_norm::{rms_norm, rms_norm_backward, rms_norm_forward};
pub use product::packed_weight::PackedWeight;
pub use settings::attention_code::AttentionCode;
pub use settings::gpu_settings::GpuSettings;
pub use settings::matmul_precision::MatmulPrecision;
pub use settings::product_choice::{ProductChoice, ProductSize};
pub use timing::op_times::OpTime;
pub use update::adamw::{AdamWBuffers, AdamWConstants, AdamWSlot, adamw};
pub use update::master_remainder::{join_master, split_master};
pub use update::sums::{sum_into, sum_of_squares, sum_of_squares_into};
