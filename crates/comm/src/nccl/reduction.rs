//! Reductions as [`ReduceOp`] defines them, out of those of NCCL.
//!
//! NCCL adds bf16 and f16 in their own precision, rounding after each addition, so they travel as f32 and are rounded once,
//! unless its own sums are wanted.
//! Averages are its sums, divided before they are rounded: its own averages multiply each value by a rounded reciprocal.
//! Its maximum and minimum drop a NaN, so a mask of the NaNs travels along: with the value `y` and the mask `m` in {0, 1},
//! ```text
//! y + sqrt(-m) = y if m = 0        (sqrt(-0) = -0, and y + -0 = y for every y)
//!              = NaN if m = 1
//! ```

use candle_core::{DType, Result, Tensor, bail};

use crate::reduction::element::divide;
use crate::{HalfSums, ReduceOp};

/// How a reduction is made.
#[derive(Clone, Copy)]
pub(super) enum Reduction {
    /// As NCCL makes it.
    Plain,
    /// In f32, rounded to this.
    Widened(DType),
    /// Sums, in f32 or as they are, divided and rounded to this.
    Averaged {
        /// Of what is averaged.
        dtype: DType,
        /// What NCCL adds.
        sums: DType,
    },
    /// With a mask of the NaNs; of a minimum one of the others, which lacks those that any rank has.
    Masked {
        /// Whether it is a minimum.
        is_min: bool,
    },
}

impl Reduction {
    pub fn new(op: ReduceOp, dtype: DType, half_sums: HalfSums) -> Self {
        let is_half = matches!(dtype, DType::BF16 | DType::F16);
        let is_widened = is_half && (half_sums == HalfSums::F32 || op == ReduceOp::Prod);
        match op {
            ReduceOp::Sum | ReduceOp::Prod if is_widened => Self::Widened(dtype),
            ReduceOp::Avg => Self::Averaged {
                dtype,
                sums: if is_widened { DType::F32 } else { dtype },
            },
            ReduceOp::Max | ReduceOp::Min if dtype.is_float() => Self::Masked {
                is_min: op == ReduceOp::Min,
            },
            _ => Self::Plain,
        }
    }

    /// Bytes that travel for each value of `dtype`.
    pub fn bytes_per_value(self, dtype: DType) -> usize {
        match self {
            Self::Plain => dtype.size_in_bytes(),
            Self::Widened(_) => DType::F32.size_in_bytes(),
            Self::Averaged { sums, .. } => sums.size_in_bytes(),
            Self::Masked { .. } => dtype.size_in_bytes() + DType::U8.size_in_bytes(),
        }
    }

    /// What NCCL reduces.
    pub fn inputs(self, xs: &Tensor) -> Result<Vec<Tensor>> {
        Ok(match self {
            Self::Plain => vec![xs.clone()],
            Self::Widened(_) => vec![xs.to_dtype(DType::F32)?],
            Self::Averaged { sums, .. } => vec![xs.to_dtype(sums)?],
            Self::Masked { is_min: false } => vec![xs.clone(), xs.ne(xs)?],
            Self::Masked { is_min: true } => vec![xs.clone(), xs.eq(xs)?],
        })
    }

    /// The result, of what NCCL has made of the inputs of so many ranks.
    pub fn finish(self, ys: &[Tensor], num_ranks: usize) -> Result<Tensor> {
        match (self, ys) {
            (Self::Plain, [y]) => Ok(y.clone()),
            (Self::Widened(dtype), [y]) => y.to_dtype(dtype),
            (Self::Averaged { dtype, .. }, [y]) => {
                let sums = match y.dtype() {
                    DType::BF16 | DType::F16 => y.to_dtype(DType::F32)?,
                    _ => y.clone(),
                };
                divide(&sums, num_ranks)?.to_dtype(dtype)
            }
            (Self::Masked { is_min }, [y, mask]) => {
                let mask = mask.to_dtype(y.dtype())?;
                let nans = if is_min {
                    mask.affine(-1.0, 1.0)?
                } else {
                    mask
                };
                y.add(&nans.neg()?.sqrt()?)
            }
            _ => bail!("a reduction gave {} tensors", ys.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn what_travels_is_what_is_counted() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::I64] {
            let xs = Tensor::zeros(5, dtype, &Device::Cpu)?;
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Prod] {
                for half_sums in [HalfSums::F32, HalfSums::Native] {
                    let reduction = Reduction::new(op, dtype, half_sums);
                    let bytes = |xs: &Tensor| xs.elem_count() * xs.dtype().size_in_bytes();
                    let sent: usize = reduction.inputs(&xs)?.iter().map(bytes).sum();
                    assert_eq!(sent, 5 * reduction.bytes_per_value(dtype));
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_mask_brings_nan_back_and_changes_nothing_else() -> Result<()> {
        let masks = [[0u8, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0]];
        let y = [0f32, -0.0, -1.5, f32::INFINITY, 3.0, f32::NEG_INFINITY];
        for (mask, is_min) in masks.iter().zip([false, true]) {
            let [y, mask] = [
                Tensor::new(&y, &Device::Cpu)?,
                Tensor::new(mask, &Device::Cpu)?,
            ];
            let masked = Reduction::Masked { is_min };
            let got = masked.finish(&[y, mask], 2)?.to_vec1::<f32>()?;
            let bits: Vec<u32> = got[..4].iter().map(|y| y.to_bits()).collect();
            let expected = [0f32, -0.0, -1.5, f32::INFINITY].map(f32::to_bits);
            assert_eq!(bits, expected);
            assert!(got[4].is_nan() && got[5].is_nan());
        }
        Ok(())
    }
}
