//! Each mistake of a program, made once.
#![allow(unsafe_code)]

use super::process::{in_own_process, says};
use candle_core::cuda_backend::cudarc::cublas::{result as blas, sys as blas_sys};
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUresult, CUstream};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, result};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::ptr::null_mut;
use std::sync::Arc;

/// A kernel of the project; what looks like compiled code stands for the project's own modules.
pub fn kernel(context: &Arc<CudaContext>, name: &str) -> CudaFunction {
    let image = [&b"\x7fELF"[..], &[0; 12]].concat();
    let module = context.load_module(Ptx::from_binary(image)).unwrap();
    module.load_function(name).unwrap()
}

/// Launches `fill_f32(dst, 1.0, len)` on the default stream with 64 blocks, and waits.
fn fill(context: &Arc<CudaContext>, dst: u64, len: i64, shared_bytes: u32) -> Result<(), CUresult> {
    fill_grid(context, dst, len, (64, 1, 1), shared_bytes)
}

fn fill_grid(
    context: &Arc<CudaContext>,
    dst: u64,
    len: i64,
    grid: (u32, u32, u32),
    shared_bytes: u32,
) -> Result<(), CUresult> {
    let function = kernel(context, "fill_f32");
    let (mut dst, mut value, mut len) = (dst, 1f32, len);
    let mut arguments: [*mut c_void; 3] = [
        (&raw mut dst).cast(),
        (&raw mut value).cast(),
        (&raw mut len).cast(),
    ];
    // SAFETY: the arguments have the kernel's types; the mistakes of the tests are the emulator's to find.
    unsafe {
        result::launch_kernel(
            function.cu_function(),
            grid,
            (64, 1, 1),
            shared_bytes,
            null_mut(),
            &mut arguments,
        )
    }
    .and_then(|()| context.synchronize())
    .map_err(|err| err.0)
}

fn malloc(bytes: usize) -> Result<u64, CUresult> {
    // SAFETY: nothing is read or written.
    unsafe { result::malloc_sync(bytes) }.map_err(|err| err.0)
}

fn free(address: u64) -> Result<(), CUresult> {
    // SAFETY: a wrong address is the emulator's to find.
    unsafe { result::free_sync(address) }.map_err(|err| err.0)
}

#[test]
fn a_pointer_to_nothing() {
    says(
        "faults::a_pointer_to_nothing",
        &[],
        &["fill_f32, argument 0"],
        || {
            let context = CudaContext::new(0).unwrap();
            let on_host = [0f32; 64];
            let address = on_host.as_ptr() as u64;
            let error = fill(&context, address, 64, 0).unwrap_err();
            assert_eq!(error, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            // A GPU that failed stays failed.
            assert_eq!(malloc(4), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        },
    );
}

#[test]
fn a_use_after_free() {
    says("faults::a_use_after_free", &[], &["were freed"], || {
        let context = CudaContext::new(0).unwrap();
        let address = malloc(256).unwrap();
        free(address).unwrap();
        let error = fill(&context, address, 64, 0).unwrap_err();
        assert_eq!(error, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn a_write_beyond_the_end() {
    says(
        "faults::a_write_beyond_the_end",
        &[],
        &["fill_f32 wrote beside"],
        || {
            let context = CudaContext::new(0).unwrap();
            let address = malloc(4 * 63).unwrap();
            assert_eq!(fill(&context, address, 63, 0), Ok(()));
            let error = fill(&context, address, 64, 0).unwrap_err();
            assert_eq!(error, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        },
    );
}

#[test]
fn a_second_free() {
    says("faults::a_second_free", &[], &["was freed before"], || {
        let _context = CudaContext::new(0).unwrap();
        let address = malloc(4).unwrap();
        assert_eq!(free(address), Ok(()));
        assert_eq!(free(address), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    });
}

#[test]
fn launches_that_no_gpu_takes() {
    let context = CudaContext::new(0).unwrap();
    let address = malloc(256).unwrap();
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(fill_grid(&context, address, 64, (0, 1, 1), 0), invalid);
    assert_eq!(fill_grid(&context, address, 64, (1, 65536, 1), 0), invalid);
    assert_eq!(fill(&context, address, 64, (48 << 10) + 1), invalid);
    assert_eq!(fill(&context, address, 64, 48 << 10), Ok(()));
    free(address).unwrap();
}

#[test]
fn shared_memory_beyond_the_attribute() {
    let context = CudaContext::new(0).unwrap();
    let function = kernel(&context, "attention_backward_q_f32");
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert!(function.set_attribute(attribute, 227 << 10).is_ok());
    assert!(function.set_attribute(attribute, (227 << 10) + 1).is_err());
}

#[test]
fn an_allocation_of_nothing() {
    let _context = CudaContext::new(0).unwrap();
    assert_eq!(malloc(0), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
}

#[test]
fn more_memory_than_there_is() {
    let memory = [("EMULATED_GPU_BYTES", "1048576")];
    says("faults::more_memory_than_there_is", &memory, &[], || {
        let _context = CudaContext::new(0).unwrap();
        let address = malloc(1 << 19).unwrap();
        let full = Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(malloc((1 << 19) + 1), full);
        free(address).unwrap();
        assert!(malloc((1 << 19) + 1).is_ok());
    });
}

#[test]
fn a_thread_without_a_context() {
    says(
        "faults::a_thread_without_a_context",
        &[],
        &["without a current context"],
        || {
            let _context = CudaContext::new(0).unwrap();
            let error = std::thread::spawn(|| malloc(4)).join().unwrap();
            assert_eq!(error, Err(CUresult::CUDA_ERROR_INVALID_CONTEXT));
        },
    );
}

#[test]
fn the_host_reads_an_address_of_the_gpu() {
    let test = "faults::the_host_reads_an_address_of_the_gpu";
    let output = in_own_process(test, &[], || {
        let _context = CudaContext::new(0).unwrap();
        let address = malloc(4).unwrap();
        // SAFETY: none; the process is to end here.
        let value = unsafe { std::ptr::read_volatile(address as *const u32) };
        println!("read {value}");
    });
    if let Some(output) = output {
        assert_eq!(output.status.signal(), Some(11), "{output:?}");
    }
}

#[test]
fn a_function_of_another_gpu() {
    let gpus = [("EMULATED_GPUS", "2")];
    let sentences = ["was loaded on GPU 0 and launched on a stream of GPU 1"];
    says(
        "faults::a_function_of_another_gpu",
        &gpus,
        &sentences,
        || {
            let function = kernel(&CudaContext::new(0).unwrap(), "fill_f32");
            let _other = CudaContext::new(1).unwrap();
            let stream: CUstream = null_mut();
            let grid = (1, 1, 1);
            // SAFETY: the launch is refused before the arguments are looked at.
            let launch = unsafe {
                result::launch_kernel(function.cu_function(), grid, grid, 0, stream, &mut [])
            };
            assert_eq!(launch.unwrap_err().0, CUresult::CUDA_ERROR_INVALID_HANDLE);
        },
    );
}

#[test]
fn memory_of_another_gpu() {
    let gpus = [("EMULATED_GPUS", "2")];
    let sentences = ["are on another GPU"];
    says("faults::memory_of_another_gpu", &gpus, &sentences, || {
        let _first = CudaContext::new(0).unwrap();
        let address = malloc(256).unwrap();
        let other = CudaContext::new(1).unwrap();
        let error = fill(&other, address, 64, 0).unwrap_err();
        assert_eq!(error, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}

/// `c = a b` of three `size x size` matrices in buffers of `bytes`, the columns of a `stride` apart.
fn product(size: i32, stride: i32, bytes: usize) -> Result<(), blas_sys::cublasStatus_t> {
    let context = CudaContext::new(0).unwrap();
    let handle = blas::create_handle().unwrap();
    let [a, b, c] = [(); 3].map(|()| malloc(bytes).unwrap());
    let (one, zero) = (1f32, 0f32);
    let plain = blas_sys::cublasOperation_t::CUBLAS_OP_N;
    // SAFETY: the sizes' mistakes are the emulator's to find.
    let result = unsafe {
        blas::sgemm(
            handle,
            plain,
            plain,
            size,
            size,
            size,
            &one,
            a as *const _,
            stride,
            b as *const _,
            size,
            &zero,
            c as *mut _,
            size,
        )
    };
    context.synchronize().ok();
    result.map_err(|err| err.0)
}

#[test]
fn products_of_wrong_sizes() {
    says(
        "faults::products_of_wrong_sizes",
        &[],
        &["go beyond the end", "lda is 7"],
        || {
            use blas_sys::cublasStatus_t::{
                CUBLAS_STATUS_EXECUTION_FAILED, CUBLAS_STATUS_INVALID_VALUE,
            };
            assert_eq!(product(8, 8, 256), Ok(()));
            assert_eq!(product(8, 7, 256), Err(CUBLAS_STATUS_INVALID_VALUE));
            assert_eq!(product(8, 9, 256), Err(CUBLAS_STATUS_EXECUTION_FAILED));
        },
    );
}
