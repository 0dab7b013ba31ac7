//! The work of collectives, where the ranks' tensors are.

use candle_core::{Device, Result, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::slot::{Deposit, Outputs};
use super::{LocalCommunicator, host};
use crate::Communicator;
use crate::element::with_element;
use crate::plan::Plan;

/// The outputs of a collective, in their places or with storages of their own on the ranks' devices. On GPUs they are only enqueued
/// on return. With `parallel` on all cores.
pub(super) fn run(
    deposits: &[Deposit],
    group: &LocalCommunicator,
    parallel: bool,
) -> Result<Outputs> {
    let Deposit { call, input, .. } = &deposits[0];
    let plan = Plan::new(&call.operation, input.shape(), deposits.len(), None);
    match group.device() {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => cuda::run(plan, deposits, group),
        _ => with_element!(input.dtype(), host::run(plan, deposits, parallel)),
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
