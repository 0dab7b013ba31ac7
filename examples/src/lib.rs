//! What `bench_train` measures steps by: the products alone, the process's memory.
#![deny(unsafe_code)]

mod product_floor;
mod resource_usage;

pub use product_floor::product_floor_secs;
pub use resource_usage::{page_faults, peak_rss_bytes};
