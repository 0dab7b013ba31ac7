//! Reductions as [`ReduceOp`] defines them, out of those of NCCL.
//!
//! NCCL adds bf16 and f16 in their own precision, rounding after each rank, so they travel as f32 and are rounded once.
//! Its maximum drops a NaN, so a mask of the NaNs travels along: with the largest value `y` and the mask `m` in {0, 1},
//! ```text
//! y + sqrt(-m) = y if m = 0        (sqrt(-0) = -0, and y + -0 = y for every y)
//!              = NaN if m = 1
//! ```

use candle_core::{DType, Result, Tensor, bail};

use crate::ReduceOp;

/// How a reduction is made.
#[derive(Clone, Copy)]
pub(super) enum Reduction {
    /// As NCCL makes it.
    Plain,
    /// In f32, rounded to this.
    Widened(DType),
    /// With a mask of the NaNs.
    Masked,
}

impl Reduction {
    pub fn new(op: ReduceOp, dtype: DType) -> Self {
        match op {
            ReduceOp::Sum if matches!(dtype, DType::BF16 | DType::F16) => Self::Widened(dtype),
            ReduceOp::Max if dtype.is_float() => Self::Masked,
            _ => Self::Plain,
        }
    }

    /// What NCCL reduces.
    pub fn inputs(self, xs: &Tensor) -> Result<Vec<Tensor>> {
        Ok(match self {
            Self::Plain => vec![xs.clone()],
            Self::Widened(_) => vec![xs.to_dtype(DType::F32)?],
            Self::Masked => vec![xs.clone(), xs.ne(xs)?],
        })
    }

    /// The result, of what NCCL has made of the inputs.
    pub fn finish(self, ys: &[Tensor]) -> Result<Tensor> {
        match (self, ys) {
            (Self::Plain, [y]) => Ok(y.clone()),
            (Self::Widened(dtype), [y]) => y.to_dtype(dtype),
            (Self::Masked, [y, mask]) => y.add(&mask.to_dtype(y.dtype())?.neg()?.sqrt()?),
            _ => bail!("a reduction gave {} tensors", ys.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_mask_brings_nan_back_and_changes_nothing_else() -> Result<()> {
        let mask = Tensor::new(&[0u8, 0, 0, 0, 1, 1], &Device::Cpu)?;
        let y = [0f32, -0.0, -1.5, f32::INFINITY, 3.0, f32::NEG_INFINITY];
        let y = Tensor::new(&y, &Device::Cpu)?;
        let got = Reduction::Masked.finish(&[y, mask])?.to_vec1::<f32>()?;
        let bits: Vec<u32> = got[..4].iter().map(|y| y.to_bits()).collect();
        let expected = [0f32, -0.0, -1.5, f32::INFINITY].map(f32::to_bits);
        assert_eq!(bits, expected);
        assert!(got[4].is_nan() && got[5].is_nan());
        Ok(())
    }
}
