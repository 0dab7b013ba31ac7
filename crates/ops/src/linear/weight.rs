//! The weight of a linear layer, the shapes of what it is multiplied with, and what is added to the product.

use crate::product::packed_weight::PackedWeight;
use candle_core::{Result, Tensor, bail};

/// A weight (out, in) that a linear layer multiplies with, and its packed form, if there is one.
#[derive(Clone, Copy, Debug)]
pub struct LinearWeight<'a> {
    /// The values.
    pub values: &'a Tensor,
    /// The same ones in the orders in which products read them: of this very weight, as no product compares the two.
    pub packed: Option<&'a PackedWeight>,
}

impl<'a> From<&'a Tensor> for LinearWeight<'a> {
    fn from(values: &'a Tensor) -> Self {
        Self {
            values,
            packed: None,
        }
    }
}

/// Values that a layer adds to its product, in the same rounding.
#[derive(Clone, Copy)]
pub(crate) enum Added<'a> {
    Nothing,
    /// `(out)`, to each row.
    Bias(&'a Tensor),
    /// With the shape of the result.
    Residual(&'a Tensor),
}

/// `(out, in)` of a weight.
pub(crate) fn weight_dims(op: &str, weight: &Tensor) -> Result<(usize, usize)> {
    match *weight.dims() {
        [num_out, num_in] => Ok((num_out, num_in)),
        ref dims => bail!("{op}: expected weight (out, in), got {dims:?}"),
    }
}

/// Number of rows of `tensor (.., len)`, and its leading dimensions.
pub(crate) fn rows_of<'a>(
    op: &str,
    what: &str,
    tensor: &'a Tensor,
    len: usize,
) -> Result<(usize, &'a [usize])> {
    match tensor.dims() {
        [leading @ .., last] if *last == len => Ok((leading.iter().product(), leading)),
        dims => bail!("{op}: expected {what} (.., {len}), got {dims:?}"),
    }
}
