//! From f32 to bf16 in memory that exists.

use crate::brain_float::round_into as round_values;
use crate::host::HostF32;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

const NAME: &str = "round_into";

/// Overwrites `dst` with `values`, rounded to the nearest bf16, ties to even; outside any graph.
///
/// # Shapes
/// `dst`, bf16, contiguous, with as many values as `values`, f32, in row-major order.
///
/// # Errors
/// When the numbers of values differ, `dst` is not contiguous, or a tensor has another dtype or device.
pub fn round_into(dst: &Tensor, values: &Tensor) -> Result<()> {
    if dst.elem_count() != values.elem_count() {
        bail!(
            "{NAME}: expected as many values as dst has, {}, got {}",
            dst.elem_count(),
            values.elem_count()
        )
    }
    let values = HostF32::new(NAME, "values", values)?;
    if dst.elem_count() == 0 {
        return Ok(());
    }
    dst.inplace_op1(&Round(values))
}

struct Round(HostF32);

impl InplaceOp1 for Round {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::BF16(dst), Some((start, end))) => {
                round_values(&mut dst[start..end], &self.0.read());
                Ok(())
            }
            _ => bail!("{NAME}: dst must be contiguous BF16 on the CPU"),
        }
    }
}
