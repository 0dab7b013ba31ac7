//! What has been allocated where a rank computes: how activations are measured.

use std::sync::OnceLock;

use candle_core::{Device, Result};
use candle_ops::GpuState;

static THREAD_BYTES: OnceLock<fn() -> i64> = OnceLock::new();

/// Lets `bytes` tell how many bytes the calling thread has allocated, less those that it has freed. The first call counts.
///
/// candle says nothing of its allocations, and a library must not choose an allocator. So a program whose own one counts tells it
/// here; of one that does not, [`MemoryCategory::Activations`](crate::MemoryCategory::Activations) are 0 on the CPU. On a GPU its
/// driver counts.
pub fn count_thread_memory_with(bytes: fn() -> i64) {
    THREAD_BYTES.get_or_init(|| bytes);
}

/// Bytes of the calling thread, or of all tensors on its GPU; `None` if nobody counts them.
pub(super) fn allocated_bytes(device: &Device) -> Result<Option<i64>> {
    match device.is_cpu() {
        true => Ok(THREAD_BYTES.get().map(|bytes| bytes())),
        false => Ok(GpuState::used_on(device)?.map(|bytes| bytes as i64)),
    }
}
