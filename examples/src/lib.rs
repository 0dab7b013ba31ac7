//! What `bench_train` measures steps by: the operations that they need, the products alone, the process's memory.
#![deny(unsafe_code)]

mod model_flops;
mod product_floor;
mod resource_usage;

pub use model_flops::{flops_per_token, peak_tflops};
pub use product_floor::product_floor_secs;
pub use resource_usage::{page_faults, peak_rss_bytes};
