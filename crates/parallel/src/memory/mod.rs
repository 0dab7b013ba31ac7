//! How many bytes a rank holds, by what they are for.

mod allocated;
mod category;
mod meter;
mod report;

use candle_core::Tensor;

pub use allocated::count_memory_with;
pub use category::MemoryCategory;
pub use meter::{MemoryGuard, MemoryMeter};
pub use report::{MemoryReport, MemoryUse};

/// Memory of a tensor's values.
pub(crate) fn num_bytes(values: &Tensor) -> usize {
    values.elem_count() * values.dtype().size_in_bytes()
}
