//! From an operation to the code for the device that holds its tensors.

/// Leaves the function with `$call` if `$tensor` is on a GPU; what follows is for the CPU. A build without CUDA has no
/// such tensors.
macro_rules! on_cuda {
    ($tensor:expr => $call:expr) => {
        #[cfg(feature = "cuda")]
        if $tensor.device().is_cuda() {
            return $call;
        }
    };
}
pub(crate) use on_cuda;
