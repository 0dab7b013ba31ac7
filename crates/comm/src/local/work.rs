//! The work of collectives, where the ranks' tensors are.

use candle_core::{Device, Result, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::host;
use crate::Operation;

/// The outputs of a collective, one per rank, in its place or with a storage of its own on the rank's device. On GPUs it is only
/// enqueued on return. With `parallel` on all cores.
pub(super) fn run(
    operation: &Operation,
    inputs: &[Tensor],
    places: &[Option<Tensor>],
    devices: &[&Device],
    parallel: bool,
) -> Result<Vec<Tensor>> {
    match devices.first() {
        #[cfg(feature = "cuda")]
        Some(Device::Cuda(_)) => cuda::run(operation, inputs, places, devices),
        _ => host::run(operation, inputs, places, parallel),
    }
}

/// A copy of `xs` on `device`, with a storage of its own, of the size of `xs` even if `xs` is a view of something larger.
pub(super) fn copy(xs: &Tensor, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => cuda::copy(xs, device),
        _ => xs.force_contiguous(),
    }
}
