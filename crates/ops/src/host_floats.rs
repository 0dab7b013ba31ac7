//! Reading tensors of f32, bf16 or f16 in host memory as f32: what is f32 is read where it is, the others are widened.

use crate::half_precision::widened;
use crate::host::{Values, detached};
use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use half::{bf16, f16};
use std::ops::Deref;

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

    pub(crate) fn dtype(&self) -> DType {
        self.0.dtype()
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.0
    }

    pub(crate) fn into_tensor(self) -> Tensor {
        self.0
    }

    /// The values: f32 under candle's read lock, others as a widened copy that lives as long as what is returned.
    pub(crate) fn read(&self) -> Floats<'_> {
        match self.dtype() {
            DType::BF16 => Floats::Widened(widened(&self.read_as::<bf16>())),
            DType::F16 => Floats::Widened(widened(&self.read_as::<f16>())),
            _ => Floats::InPlace(self.read_as()),
        }
    }

    /// The values of a tensor of `T`, as they are.
    pub(crate) fn read_as<T: WithDType>(&self) -> Values<'_, T> {
        Values::new(&self.0, |storage| {
            T::cpu_storage_as_slice(storage).unwrap_or_default()
        })
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

/// The values of a tensor, in row-major order, as f32.
pub(crate) enum Floats<'a> {
    InPlace(Values<'a, f32>),
    Widened(Vec<f32>),
}

impl Deref for Floats<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::InPlace(values) => values,
            Self::Widened(values) => values,
        }
    }
}
