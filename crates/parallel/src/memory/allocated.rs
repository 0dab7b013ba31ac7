//! What has been allocated where a rank computes: how activations are measured.

use std::sync::OnceLock;

use candle_core::{Device, Result};
use candle_ops::GpuState;

static COUNT: OnceLock<fn() -> i64> = OnceLock::new();

/// Lets `bytes` tell how many bytes the rank that calls it has allocated and not freed, in blocks of
/// [`MIN_ADOPTED_BYTES`](candle_comm::MIN_ADOPTED_BYTES) or more: those of its threads, or of its process if it has that for itself.
/// The first call counts.
///
/// candle says nothing of its allocations, and a library must not choose an allocator. So a program whose own one counts tells it
/// here; of one that does not, [`MemoryCategory::Activations`](crate::MemoryCategory::Activations) are not measured on the CPU
/// ([`MemoryReport::measured`](crate::MemoryReport::measured)). On a GPU its driver counts.
pub fn count_memory_with(bytes: fn() -> i64) {
    COUNT.get_or_init(|| bytes);
}

/// Whether this program counts, so that a rank without passes, such as a parameter server, is known to hold no activations.
pub(super) fn is_counted() -> bool {
    COUNT.get().is_some()
}

/// Bytes of the calling rank, or of all tensors on its GPU; `None` if nobody counts them.
pub(super) fn allocated_bytes(device: &Device) -> Result<Option<i64>> {
    match device.is_cpu() {
        true => Ok(COUNT
            .get()
            .map(|bytes| bytes() + candle_comm::adopted_bytes())),
        false => Ok(GpuState::used_on(device)?.map(|bytes| bytes as i64)),
    }
}
