//! How many bytes a rank holds, by what they are for.

mod allocated;
mod category;
mod meter;
mod report;

pub use allocated::count_memory_with;
pub use category::MemoryCategory;
pub use meter::{Held, MemoryMeter};
pub use report::{MemoryReport, MemoryUse};
