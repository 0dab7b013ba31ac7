//! What a GPU is called and how much of its memory is used.

use candle_core::{Device, Result};

/// A GPU: its name, its libraries and its memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuState {
    /// What its driver calls it.
    pub name: String,
    /// Versions of the driver and of the libraries that compute here.
    pub libraries: String,
    /// What tensors of this process hold now.
    pub used: u64,
    /// The most they have held at a time.
    pub peak: u64,
    /// What neither this process holds nor another one.
    pub free: u64,
    /// All memory of the GPU.
    pub total: u64,
}

impl GpuState {
    /// What tensors of this process hold on `device`, in bytes; `None` for the CPU. As cheap as a call of the driver can be: it
    /// asks its memory pool, and waits for nothing.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn used_on(device: &Device) -> Result<Option<u64>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => super::gpu_state_gpu::used_bytes(cuda).map(Some),
            _ => Ok(None),
        }
    }

    /// Dense operations per second in 16 bits, in units of 10^12, as its maker states them: NVIDIA H100 and H200 Tensor Core GPU
    /// datasheets, SXM, without sparsity. `None` for others.
    pub fn peak_tflops(&self) -> Option<f64> {
        let is_known = ["H100", "H200"].iter().any(|name| self.name.contains(name));
        is_known.then_some(989.0)
    }

    /// The state of `device`; `None` for the CPU. Waits for nothing: memory counts from when the host asks for it.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn of(device: &Device) -> Result<Option<Self>> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => super::gpu_state_gpu::state(cuda).map(Some),
            _ => Ok(None),
        }
    }
}
