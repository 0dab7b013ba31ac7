//! One contiguous f32 buffer that many parameters share.

use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;

/// Values handled by one task; fixed, so that sums do not depend on the number of threads.
const CHUNK: usize = 16 * 1024;

/// A flat f32 tensor that is written in place, part by part.
#[derive(Clone, Debug)]
pub(crate) struct FlatBuffer(Tensor);

impl FlatBuffer {
    pub fn zeros(len: usize, device: &Device) -> Result<Self> {
        Ok(Self(Tensor::zeros(len, DType::F32, device)?))
    }

    /// Wraps a flat tensor, for example what a collective returned.
    pub fn new(flat: Tensor) -> Result<Self> {
        flat.dims1()?;
        Ok(Self(flat.to_dtype(DType::F32)?))
    }

    pub fn tensor(&self) -> &Tensor {
        &self.0
    }

    /// The `len` values from `offset` on, sharing this buffer.
    pub fn view(&self, offset: usize, len: usize) -> Result<Tensor> {
        self.0.narrow(0, offset, len)
    }

    /// Overwrites the values from `offset` on.
    pub fn write(&self, offset: usize, values: &Tensor) -> Result<()> {
        let values = values.flatten_all()?.to_dtype(DType::F32)?.contiguous()?;
        if values.elem_count() == 0 {
            return Ok(());
        }
        self.0.slice_set(&values, 0, offset)
    }

    /// Adds to the values from `offset` on.
    pub fn add(&self, offset: usize, values: &Tensor) -> Result<()> {
        let values = values.flatten_all()?.to_dtype(DType::F32)?.contiguous()?;
        if values.elem_count() == 0 {
            return Ok(());
        }
        let view = self.view(offset, values.elem_count())?;
        view.inplace_op2(&values, &AddAssign)
    }

    /// Calls `read` with the values.
    pub fn read<T>(&self, read: impl FnOnce(&[f32]) -> T) -> Result<T> {
        let (storage, layout) = self.0.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => Ok(read(contiguous(storage, layout)?)),
            _ => bail!("flat buffers on {:?} are not supported", self.0.device()),
        }
    }
}

/// Σ x² in f64, the same bits for any number of threads.
pub(crate) fn sum_of_squares(values: &[f32]) -> f64 {
    let square_sum =
        |chunk: &[f32]| -> f64 { chunk.iter().map(|&x| f64::from(x) * f64::from(x)).sum() };
    let partial: Vec<f64> = values.par_chunks(CHUNK).map(square_sum).collect();
    partial.iter().sum()
}

/// The values of a contiguous f32 tensor.
pub(crate) fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("expected a contiguous f32 tensor, got layout {layout:?}"),
    }
}

/// The values of a contiguous f32 tensor, to be written.
pub(crate) fn contiguous_mut<'a>(
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&mut values[start..end]),
        _ => bail!("expected a contiguous f32 tensor, got layout {layout:?}"),
    }
}

struct AddAssign;

impl InplaceOp2 for AddAssign {
    fn name(&self) -> &'static str {
        "add_assign"
    }

    fn cpu_fwd(
        &self,
        sum: &mut CpuStorage,
        sum_layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> Result<()> {
        let values = contiguous(values, values_layout)?;
        contiguous_mut(sum, sum_layout)?
            .par_chunks_mut(CHUNK)
            .zip(values.par_chunks(CHUNK))
            .for_each(|(sum, values)| {
                sum.iter_mut().zip(values).for_each(|(s, v)| *s += v);
            });
        Ok(())
    }
}
