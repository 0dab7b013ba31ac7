//! Tensors of f32, bf16 or f16 in host memory: the check that an operation makes first, and the values where they are.

use super::values::{HostValues, detached};
use candle_core::{DType, Device, Result, Tensor, WithDType, bail};

/// A contiguous, detached tensor of f32, bf16 or f16 on the CPU.
#[derive(Clone)]
pub(crate) struct HostFloats(Tensor);

impl HostFloats {
    /// Checks `tensor`, the argument `what` of the operation `op`; copies it only if it is not contiguous.
    pub(crate) fn new(op: &str, what: &str, tensor: &Tensor) -> Result<Self> {
        let is_float = matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16);
        if !matches!(tensor.device(), Device::Cpu) || !is_float {
            bail!(
                "{op}: {what} must be an F32, BF16 or F16 tensor on the CPU, got dtype {:?} on device {:?}\nhint: convert it with to_dtype or move it with to_device",
                tensor.dtype(),
                tensor.device().location()
            )
        }
        Ok(Self(detached(tensor)?))
    }

    /// The arguments `(what, tensor)` of `op`, which must have one dtype.
    pub(crate) fn of_one_dtype<const N: usize>(
        op: &str,
        arguments: [(&str, &Tensor); N],
    ) -> Result<[Self; N]> {
        let hosts = arguments.map(|(what, tensor)| Self::new(op, what, tensor));
        let hosts = hosts.into_iter().collect::<Result<Vec<_>>>()?;
        let whats = arguments.iter().map(|(what, _)| *what);
        one_dtype(op, &whats.zip(&hosts).collect::<Vec<_>>())?;
        hosts
            .try_into()
            .or_else(|_| bail!("{op}: expected {N} arguments"))
    }

    pub(crate) fn dtype(&self) -> DType {
        self.0.dtype()
    }

    pub(crate) fn into_tensor(self) -> Tensor {
        self.0
    }

    /// The values of a tensor of `T`, as they are.
    pub(crate) fn read_as<T: WithDType>(&self) -> HostValues<'_, T> {
        HostValues::new(&self.0)
    }
}

/// The one dtype of the arguments `(what, tensor)` of `op`; an error that names two that differ.
pub(crate) fn one_dtype(op: &str, arguments: &[(&str, &HostFloats)]) -> Result<DType> {
    let Some(((first, host), rest)) = arguments.split_first() else {
        bail!("{op}: expected at least one argument, got none")
    };
    for (what, other) in rest {
        if other.dtype() != host.dtype() {
            bail!(
                "{op}: {first} and {what} must have one dtype, got {:?} and {:?}\nhint: convert one of them with to_dtype",
                host.dtype(),
                other.dtype()
            )
        }
    }
    Ok(host.dtype())
}
