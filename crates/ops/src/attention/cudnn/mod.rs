//! Attention by cuDNN's fused kernels, causal or to all keys, where it can: bf16 and f16, head dimensions that are multiples of 8 up to 256, whole
//! groups of query heads, sm_80 and later. Everything else goes to this crate's own kernels, which says why, once for each
//! reason, through `tracing`.
//!
//! The pass is described to cuDNN 9 as a graph of products, sums and elementwise functions, by descriptors of its backend
//! interface; cuDNN finds the fused kernel that computes the whole graph. Plans are kept for the life of the program. The
//! log-sum-exps are those of our kernels, `(b, heads, t)`, so that either's backward pass can follow either's forward pass.
//! The gradient of the queries is added up in one f32 tensor, in no fixed order, so its bits differ from run to run. If
//! [`GpuSettings::deterministic`](crate::GpuSettings) is set it is added up in a fixed order, from the gradients of all scores
//! in a workspace; that grows with the square of the length, with a window too, so a backward pass over many long sequences is
//! several calls.
//!
//! Sequences of several documents each are another graph: each document is a sequence of the batch, and tensors of the call say
//! where it begins and how many tokens it has (`attention::ragged`). The log-sum-exps then lie by token; they are brought into the order of our
//! kernels, and back. Numbers of documents and their lengths are padded to powers of two, so that few plans are made. The graphs are
//! those of NVIDIA's cudnn-frontend 1.32, operation by operation, as cuDNN's log shows both.
//!
//! A configuration of kernels that fails when it runs gives way to the next that cuDNN suggests.
//!
//! The library is opened when it is first needed, so a build needs neither its headers nor itself.
//! `CANDLE_TRAIN_ATTENTION=own` leaves cuDNN out; with `=cudnn` attention in 16 bits that cuDNN cannot compute is an error;
//! `CANDLE_TRAIN_CUDNN_CONFIG` names the configuration.
//!
//! An H100 has run all of it with cuDNN 9.19 (`docs/gpu/RESULTS.md`), by `scripts/gpu-check.sh`, which compares the results with
//! PyTorch's. Without a GPU a test has cuDNN plan the graphs for sm_80 and sm_90, with `CANDLE_TRAIN_CUDNN_PLANS=1`.

#![allow(unsafe_code)]

mod backward;
mod call;
mod choice;
mod configurations;
mod descriptor;
mod forward;
mod graph;
mod plan;
mod plans;
mod sizes;
mod work;

pub(super) use call::{attention_backward, attention_forward};
