//! What kernels on the CPU are made of: vectors, types of values, and work cut into chunks for all cores.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod chunks;
pub(crate) mod element;
pub(crate) mod exp;
pub(crate) mod filled;
pub(crate) mod half_precision;
pub(crate) mod host_value;
pub(crate) mod lanes;
pub(crate) mod lines;
pub(crate) mod mapped;
pub(crate) mod processor;
pub(crate) mod shared_buffer;
pub(crate) mod vector;
pub(crate) mod vectorised;
