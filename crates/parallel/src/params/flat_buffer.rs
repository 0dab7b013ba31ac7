//! One contiguous f32 buffer that many parameters share.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::add_into;

use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

/// A flat f32 tensor that is written in place, part by part.
#[derive(Clone, Debug)]
pub(crate) struct FlatBuffer {
    values: Tensor,
    /// Counts its bytes while a clone of the buffer exists.
    _held: Option<Arc<MemoryGuard>>,
}

impl FlatBuffer {
    pub fn zeros(len: usize, device: &Device) -> Result<Self> {
        // A GPU allocates no 0 bytes.
        let zeros = Tensor::zeros(len.max(1), DType::F32, device).map_err(|err| {
            let bytes = len * DType::F32.size_in_bytes();
            err.context(format!(
                "asking for {bytes} bytes for gradients or the optimizer's state"
            ))
        });
        Self::new(zeros?.narrow(0, 0, len)?)
    }

    /// Wraps a flat tensor, for example what a collective returned.
    pub fn new(flat: Tensor) -> Result<Self> {
        flat.dims1()?;
        Ok(Self {
            values: flat.to_dtype(DType::F32)?,
            _held: None,
        })
    }

    /// A part of the buffer, all of which counts while the part is there.
    pub fn part(&self, range: &Range<usize>) -> Result<Self> {
        Ok(Self {
            values: self.view(range.start, range.len())?,
            _held: self._held.clone(),
        })
    }

    /// The buffer with its bytes counted.
    pub fn counted(self, meter: &MemoryMeter, category: MemoryCategory) -> Self {
        let _held = Some(Arc::new(meter.hold(category, self.num_bytes())));
        Self { _held, ..self }
    }

    pub fn into_tensor(self) -> Tensor {
        self.values
    }

    pub fn tensor(&self) -> &Tensor {
        &self.values
    }

    /// The `len` values from `offset` on, sharing this buffer.
    pub fn view(&self, offset: usize, len: usize) -> Result<Tensor> {
        self.values.narrow(0, offset, len)
    }

    /// Overwrites the values from `offset` on, with values of f32, bf16 or f16.
    pub fn write(&self, offset: usize, values: &Tensor) -> Result<()> {
        self.put(offset, values, false)
    }

    /// Adds to the values from `offset` on, values of f32, bf16 or f16.
    pub fn add(&self, offset: usize, values: &Tensor) -> Result<()> {
        self.put(offset, values, true)
    }

    fn put(&self, offset: usize, values: &Tensor, add: bool) -> Result<()> {
        add_into(&self.view(offset, values.elem_count())?, add, values)
    }

    pub fn num_bytes(&self) -> usize {
        self.values.elem_count() * self.values.dtype().size_in_bytes()
    }

    /// The `len` values from `offset` on, on the host.
    pub fn values(&self, offset: usize, len: usize) -> Result<Vec<f32>> {
        self.view(offset, len)?.to_vec1()
    }
}
