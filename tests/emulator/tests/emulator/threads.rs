//! Mistakes of the threads of a kernel: each kernel of `shim/broken.cu` is noticed, whatever the order of the threads.
#![allow(unsafe_code)]

use super::faults::kernel;
use super::process::{in_own_process, is_own_process, says};
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;

const BLOCK: usize = 64;
const TURNS: usize = 20;

/// What the kernel reads, and the same from the end.
fn numbers() -> (Vec<f32>, Vec<f32>) {
    let values: Vec<f32> = (0..BLOCK).map(|i| i as f32).collect();
    let reversed = values.iter().rev().copied().collect();
    (values, reversed)
}

/// The two outputs of a block, with shared memory of a value for each thread less `less`.
fn run(context: &Arc<CudaContext>, name: &str, less: usize) -> Result<[Vec<f32>; 2], CUresult> {
    let (stream, function) = (context.default_stream(), kernel(context, name));
    let src = stream.clone_htod(&numbers().0).unwrap();
    // SAFETY: f32 takes any bits.
    let mut outputs = [(); 2].map(|()| unsafe { stream.alloc::<f32>(BLOCK) }.unwrap());
    let [first, second] = &mut outputs;
    let mut launch = stream.launch_builder(&function);
    launch.arg(first).arg(second).arg(&src);
    let config = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (BLOCK as u32, 1, 1),
        shared_mem_bytes: (4 * (BLOCK - less)) as u32,
    };
    // SAFETY: the arguments have the kernel's types and lengths; its mistake is the emulator's to find.
    unsafe { launch.launch(config) }
        .and_then(|_| stream.synchronize())
        .map_err(|err| err.0)?;
    Ok(outputs.map(|output| stream.clone_dtoh(&output).unwrap()))
}

#[test]
fn a_missing_barrier_is_a_wrong_result_in_every_order() {
    let context = CudaContext::new(0).unwrap();
    let reversed = numbers().1;
    for _ in 0..TURNS {
        for broken in ["broken_without_barrier", "broken_reuse"] {
            let [first, _] = run(&context, broken, 0).unwrap();
            assert_ne!(first, reversed, "{broken}");
        }
        let [first, second] = run(&context, "sound_reuse", 0).unwrap();
        assert_eq!(first, reversed);
        assert!(second.iter().zip(&reversed).all(|(a, b)| *a == 2.0 * b));
    }
}

#[test]
fn a_warp_that_is_far_ahead_of_another_is_a_wrong_result_in_some_orders() {
    let context = CudaContext::new(0).unwrap();
    let sum: f32 = numbers().0.iter().sum();
    let wrong = (0..TURNS).filter(|_| {
        let [first, second] = run(&context, "broken_second_reduction", 0).unwrap();
        first.iter().any(|x| *x != sum) || second.iter().any(|x| *x != 2.0 * sum)
    });
    assert!(wrong.count() >= 5);
}

#[test]
fn shared_memory_that_nobody_has_written_is_nan() {
    let context = CudaContext::new(0).unwrap();
    run(&context, "sound_reuse", 0).unwrap();
    let [first, _] = run(&context, "broken_uninitialised", 0).unwrap();
    assert!(first.iter().all(|x| x.is_nan()));
}

/// In a process of its own for each of three orders: a GPU whose kernel failed stays failed.
fn fails(test: &str, broken: &str, less: usize, sentences: &[&str]) {
    for seed in ["1", "2", "3"] {
        says(test, &[("EMULATED_GPU_SEED", seed)], sentences, || {
            let failed = run(&CudaContext::new(0).unwrap(), broken, less).unwrap_err();
            assert_eq!(failed, CUresult::CUDA_ERROR_LAUNCH_FAILED);
        });
        if is_own_process() {
            return;
        }
    }
}

#[test]
fn waiting_at_a_barrier_in_vain() {
    let sentences = ["broken_divergent_barrier", "broken.cu:", "never come"];
    fails(
        "threads::waiting_at_a_barrier_in_vain",
        sentences[0],
        0,
        &sentences,
    );
}

#[test]
fn waiting_at_a_shuffle_in_vain() {
    let sentences = ["broken_shuffle", "reduce.cuh:", "never come"];
    fails(
        "threads::waiting_at_a_shuffle_in_vain",
        sentences[0],
        0,
        &sentences,
    );
}

#[test]
fn a_write_behind_the_shared_memory() {
    let sentences = ["sound_reuse", "beyond its shared memory"];
    fails(
        "threads::a_write_behind_the_shared_memory",
        sentences[0],
        1,
        &sentences,
    );
}

/// The kernel ends the program, whose last words name it.
fn traps(test: &str, broken: &str) {
    let body = || {
        run(&CudaContext::new(0).unwrap(), broken, 0).ok();
    };
    if let Some(output) = in_own_process(test, &[], body) {
        assert_eq!(output.status.signal(), Some(4), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            said.contains(broken) && said.contains("misaligned"),
            "{said}"
        );
    }
}

#[test]
fn an_address_that_is_no_multiple() {
    traps(
        "threads::an_address_that_is_no_multiple",
        "broken_alignment",
    );
}

#[test]
fn a_number_that_overflows() {
    traps("threads::a_number_that_overflows", "broken_overflow");
}
