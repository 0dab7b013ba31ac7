//! Names of devices.

use candle_ops::DeviceChoice;

#[test]
fn names_are_read_and_written() {
    let choices = [
        ("cpu", DeviceChoice::Cpu, "cpu"),
        ("cuda", DeviceChoice::AllCuda, "cuda"),
        ("cuda:3", DeviceChoice::Cuda(3), "cuda:3"),
    ];
    for (name, expected, written) in choices {
        let choice: DeviceChoice = name.parse().unwrap();
        assert_eq!(choice, expected);
        assert_eq!(choice.to_string(), written);
    }
}

#[test]
fn other_names_are_errors_that_say_what_is_expected() {
    for name in [
        "",
        "gpu",
        "cuda:",
        "cuda:+1",
        "cuda:-1",
        "cuda:x",
        "CUDA",
        "cuda:99999999999999999999",
    ] {
        let error = name.parse::<DeviceChoice>().unwrap_err().to_string();
        assert!(
            error.contains("`cuda:N`") && error.contains(&format!("`{name}`")),
            "{error}"
        );
    }
}

#[test]
fn the_cpu_opens() {
    assert!(DeviceChoice::Cpu.open().unwrap().is_cpu());
    let devices = DeviceChoice::Cpu.open_for(3).unwrap();
    assert!(devices.iter().all(|device| device.is_cpu()) && devices.len() == 1);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_needs_a_build_with_cuda() {
    assert_eq!(DeviceChoice::preferred(), DeviceChoice::Cpu);
    let error = DeviceChoice::Cuda(0).open().unwrap_err().to_string();
    assert!(error.contains("built without CUDA"), "{error}");
}

#[cfg(feature = "cuda")]
#[test]
fn products_on_a_gpu_are_summed_in_f32() -> candle_core::Result<()> {
    use candle_core::cuda_backend::cudarc::cublas::sys::{cublasGetMathMode, cublasMath_t};
    crate::check::on_each_device(|| {
        let device = crate::check::device();
        if device.is_cpu() {
            return Ok(());
        }
        let blas = device.as_cuda_device()?.cublas_handle();
        let mut mode = cublasMath_t::CUBLAS_DEFAULT_MATH;
        // SAFETY: the handle is the device's, the mode is written during the call.
        let status = unsafe { cublasGetMathMode(*blas.handle(), &raw mut mode) };
        assert!(status.result().is_ok());
        assert_eq!(
            mode,
            cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
        );
        Ok(())
    })
}
