//! What passes from block to block.

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::pass::Pass;

/// Shapes and types of the tensors that a block, by its index, gives in a pass.
pub(super) type Borders = dyn Fn(usize, &Pass) -> Result<Vec<(Shape, DType)>> + Send + Sync;

/// The one tensor that stands for `tensors` between two blocks.
pub(super) fn packed(tensors: Vec<(Shape, DType)>) -> Result<(Shape, DType)> {
    let Some((first, rest)) = tensors.split_first() else {
        bail!("a block gives no tensor; expected one or more");
    };
    if rest.is_empty() {
        return Ok(first.clone());
    }
    if let Some((_, other)) = rest.iter().find(|(_, dtype)| *dtype != first.1) {
        bail!(
            "a block gives tensors of {:?} and of {other:?}; expected one type\nhint: convert them before pack, and back after unpack",
            first.1
        );
    }
    let num_values = tensors
        .iter()
        .map(|(shape, _)| shape.elem_count())
        .sum::<usize>();
    Ok((num_values.into(), first.1))
}

/// Several tensors of one type as the one that a block gives to the next: a residual stream with an encoder's output, skip connections. Their
/// values one after the other, (n,), in candle's graph.
///
/// # Errors
/// No tensors, or other types or devices.
pub fn pack(tensors: &[&Tensor]) -> Result<Tensor> {
    let flat = tensors.iter().map(|xs| xs.flatten_all());
    Tensor::cat(&flat.collect::<Result<Vec<_>>>()?, 0)
}

/// What [`pack`] has put together: tensors of these shapes, in candle's graph.
///
/// # Errors
/// Shapes that have another number of values.
pub fn unpack(xs: &Tensor, shapes: &[Shape]) -> Result<Vec<Tensor>> {
    let num_values: usize = shapes.iter().map(Shape::elem_count).sum();
    if xs.elem_count() != num_values {
        bail!(
            "{} values are to be unpacked into the shapes {shapes:?}, which have {num_values}",
            xs.elem_count()
        );
    }
    let flat = xs.flatten_all()?;
    let mut start = 0;
    let tensors = shapes.iter().map(|shape| {
        let part = flat.narrow(0, start, shape.elem_count())?;
        start += shape.elem_count();
        part.reshape(shape)
    });
    tensors.collect()
}
