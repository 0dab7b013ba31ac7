//! What `bench_train` measures steps by: the products alone, a plain copy, the process's memory.
#![deny(unsafe_code)]

mod disk;
mod product_floor;
mod resource_usage;

pub use disk::{MovedBytes, moved_bytes, plain_copy_secs};
pub use product_floor::product_floor_secs;
pub use resource_usage::{page_faults, peak_rss_bytes};
