//! What a GPU without memory says while a model is built, whichever library ran out of it.

use candle_core::Error;
use candle_trainer::explain_out_of_memory;

use crate::device::devices;

#[test]
fn every_library_that_has_no_memory_is_explained_and_nothing_else() {
    let device = &devices()[0];
    for (words, is_memory) in [
        (
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
            true,
        ),
        ("CublasError(CUBLAS_STATUS_ALLOC_FAILED)", true),
        (
            "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED (4004)",
            true,
        ),
        ("CublasError(CUBLAS_STATUS_EXECUTION_FAILED)", false),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", false),
    ] {
        let said = explain_out_of_memory(Error::msg(words), device).to_string();
        assert!(said.contains(words), "{said}");
        let is_explained = said.contains("weights so far") && said.contains("\nhint: ");
        assert_eq!(is_explained, is_memory && device.is_cuda(), "{said}");
    }
}
