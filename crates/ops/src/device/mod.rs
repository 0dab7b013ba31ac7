//! The device: which one, its state, its time, and copies to and from it.

pub(crate) mod device_choice;
pub(crate) mod gpu_state;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_state_gpu;
pub(crate) mod host_copies;
#[cfg(feature = "cuda")]
pub(crate) mod host_copies_gpu;
pub(crate) mod profile;
pub(crate) mod stopwatch;
pub(crate) mod upload;
#[cfg(feature = "cuda")]
pub(crate) mod upload_gpu;
