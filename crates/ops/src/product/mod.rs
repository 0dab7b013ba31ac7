//! Products of matrices on the CPU.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod blocks;
#[cfg(target_arch = "x86_64")]
pub(crate) mod caches;
pub(crate) mod factors;
pub(crate) mod few_rows;
#[cfg(target_arch = "x86_64")]
pub(crate) mod kernel;
#[cfg(target_arch = "x86_64")]
pub(crate) mod kernels;
pub(crate) mod matrix;
pub(crate) mod packed_weight;
#[cfg(target_arch = "x86_64")]
pub(crate) mod packing;
#[cfg(target_arch = "x86_64")]
pub(crate) mod panels;
pub(crate) mod products;
#[cfg(target_arch = "x86_64")]
pub(crate) mod registers;
pub(crate) mod small;
#[cfg(target_arch = "x86_64")]
pub(crate) mod small_by_kernel;
#[cfg(target_arch = "x86_64")]
pub(crate) mod store;
#[cfg(target_arch = "x86_64")]
pub(crate) mod sum;
#[cfg(target_arch = "x86_64")]
pub(crate) mod transpose;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) mod without_kernels;
