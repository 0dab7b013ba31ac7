//! The operations on a GPU, in f32, bf16 and f16: kernels from `kernels/`, launched on candle's stream, and cuBLAS for matrix
//! products. The crate's public functions come here when their tensors are on a GPU, with shapes that they have checked;
//! here the dtypes, the device and the layouts are.
//!
//! Tested on an emulated GPU, with the kernels compiled for the CPU, and on an H100 (`docs/gpu/RESULTS.md`).

#![allow(unsafe_code)]

mod adamw;
mod adamw_slots;
mod attention;
mod attention_backward;
mod column_sum;
mod cross_entropy;
#[cfg(feature = "cudnn")]
mod cudnn;
mod device;
mod element;
mod elements;
mod embedding;
mod embedding_order;
mod gated;
mod gpu;
mod host_copies;
mod kernel_files;
mod kernel_table;
mod launch;
mod library;
mod linear;
mod loaded;
mod norm;
mod pointer;
mod profile;
mod quantized;
#[cfg(any(test, feature = "cudnn"))]
mod ragged;
mod rope;
mod state;
mod sums;
mod upload;
mod values;

pub(crate) use adamw::adamw;
pub(crate) use attention::attention_forward;
pub(crate) use attention_backward::{attention_backward, attention_backward_of_part};
pub(crate) use column_sum::{linear_bias_grad, linear_bias_grad_into};
pub(crate) use cross_entropy::{
    cross_entropy_grad, cross_entropy_grad_in_place, cross_entropy_loss, softmax_stats,
};
#[cfg(feature = "cudnn")]
pub(crate) use cudnn::is_there as has_cudnn;
pub(crate) use device::{num_gpus, open};
pub(crate) use elements::{add_into, round_into};
pub(crate) use embedding::{embedding_forward, embedding_grad, embedding_grad_into};
pub(crate) use gated::{gated_backward, gated_forward};
pub(crate) use host_copies::{CopyStreams, PinnedBuffer, StreamCopy};
pub(crate) use linear::{
    Added, linear_forward, linear_input_grad, linear_weight_grad, linear_weight_grad_into,
};
pub(crate) use norm::{Norm, norm_backward, norm_forward};
pub(crate) use profile::{Span, finish as finish_profile, mark, start as start_profile};
pub(crate) use quantized::{dequantize_rows, quantize_rows};
pub(crate) use rope::{rope, rope_in_place};
pub(crate) use state::{state, used_bytes};
pub(crate) use sums::{sum_into, sum_of_squares, sum_of_squares_into};
pub(crate) use upload::upload;
