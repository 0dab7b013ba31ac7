//! Tensors without elements.

use candle_core::{DType, Device, Result, Shape, Tensor};

/// A tensor without elements, of a shape that has none: on a GPU a view of something, for an allocation of nothing is an
/// error to CUDA.
pub(crate) fn empty(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::zeros(1, dtype, device)?
        .narrow(0, 0, 0)?
        .reshape(shape.into())
}
