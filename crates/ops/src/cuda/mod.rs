//! The operations on a GPU: kernels from `kernels/`, launched on candle's stream, and cuBLAS for matrix products.

#![allow(unsafe_code)]

mod device;
mod library;

pub(crate) use device::open;
