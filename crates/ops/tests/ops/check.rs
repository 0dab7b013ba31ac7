//! Random inputs, gradients and comparisons, on the CPU and on a GPU.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_ops::DeviceChoice;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cell::RefCell;
use std::sync::OnceLock;

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// Where the running test has its tensors.
pub fn device() -> Device {
    DEVICE.with(|device| device.borrow().clone())
}

/// Runs a test on the CPU, and on the first GPU if this build has CUDA and one answers.
pub fn on_each_device(test: impl Fn() -> Result<()>) -> Result<()> {
    test()?;
    if let Some(gpu) = gpu() {
        on_device(gpu, || {
            println!("on the GPU:");
            test()
        })?;
    }
    Ok(())
}

fn on_device<T>(device: &Device, run: impl FnOnce() -> T) -> T {
    let before = DEVICE.with(|current| current.replace(device.clone()));
    let result = run();
    DEVICE.with(|current| current.replace(before));
    result
}

/// The GPU, opened once. Where none answers the tests say so and pass, but with `CANDLE_TRAIN_REQUIRE_CUDA=1`.
fn gpu() -> Option<&'static Device> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    let open = || match DeviceChoice::Cuda(0).open() {
        Ok(device) => Some(device),
        Err(err) => {
            let required = std::env::var("CANDLE_TRAIN_REQUIRE_CUDA").is_ok_and(|v| v == "1");
            assert!(!required, "CANDLE_TRAIN_REQUIRE_CUDA is 1, but {err}");
            eprintln!("not tested on a GPU: {err}");
            None
        }
    };
    match cfg!(feature = "cuda") {
        true => GPU.get_or_init(open).as_ref(),
        false => None,
    }
}

/// A size, at most `most` on a GPU: an emulated one takes its time.
pub fn at_most(most: usize, size: usize) -> usize {
    if device().is_cpu() {
        size
    } else {
        size.min(most)
    }
}

/// A bound on the error of a GPU: its sums have other orders, and its exponentials, logarithms and divisions are exact to
/// some more units in the last place.
fn on_this_device(bound: f64) -> f64 {
    if device().is_cpu() {
        bound
    } else {
        2.0 * bound
    }
}

/// Values in -1..1, a function of the seed and the shape.
pub fn random(seed: u64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| rng.random_range(-1f32..1.0))
        .collect();
    placed(&Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// A copy on the test's device; one of nothing, too, for which candle's own allocation fails on GPUs.
pub fn placed(tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return tensor.to_device(&device());
    }
    Tensor::zeros(1, tensor.dtype(), &device())?
        .narrow(0, 0, 0)?
        .reshape(tensor.shape())
}

/// As `random`, as a variable.
pub fn random_var(seed: u64, shape: impl Into<Shape>) -> Result<Var> {
    Var::from_tensor(&random(seed, shape)?)
}

/// Ids below `bound`.
pub fn random_ids(seed: u64, count: usize, bound: u32) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(0..bound)).collect()
}

/// The values, bf16 widened.
pub fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    tensor.flatten_all()?.to_vec1()
}

/// The values in another dtype, converted by candle on the CPU.
pub fn in_dtype(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    placed(&tensor.to_device(&Device::Cpu)?.to_dtype(dtype)?)
}

pub fn doubles(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(floats(tensor)?.into_iter().map(f64::from).collect())
}

/// The gradients of `sum(y * dy)`.
pub fn grads<const N: usize>(y: &Tensor, dy: &Tensor, vars: [&Var; N]) -> Result<[Tensor; N]> {
    let store = (y * dy)?.sum_all()?.backward()?;
    Ok(vars.map(|var| {
        store
            .get(var)
            .expect("a gradient for each variable")
            .clone()
    }))
}

/// The relative L2 error that f32 is allowed where each value goes through `roundings` of them: each is off by at most
/// half an epsilon, and independent ones add up like a random walk.
pub fn rounding_error(roundings: usize) -> f64 {
    f64::from(f32::EPSILON) / 2.0 * (roundings as f64).sqrt()
}

/// Roundings of the kernels' exponential, which is exact to 2 units in the last place, four half epsilons.
pub const EXP_ROUNDINGS: usize = 16;

/// Additions one after the other in a sum of `len` terms: 32 lanes, which are then joined in pairs.
pub fn lane_roundings(len: usize) -> usize {
    len.div_ceil(32) + 5
}

/// Asserts that the L2 norm of the difference is at most `tolerance` times that of `want`.
#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, want: &[f64], tolerance: f64) {
    let got = doubles(got).expect("f32 values");
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let tolerance = on_this_device(tolerance);
    let difference: f64 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = want.iter().map(|x| x.powi(2)).sum();
    let error = difference.sqrt() / norm.sqrt().max(1e-30);
    assert!(
        error <= tolerance || difference == 0.0,
        "{what}: relative error {error:e}"
    );
}

/// Runs `f` in pools of 1 and 3 threads, on the CPU in the latter twice, and compares every bit of what it returns.
pub fn assert_same_bits(what: &str, f: impl Fn() -> Result<Vec<Tensor>> + Sync) -> Result<()> {
    let device = device();
    let bits = |num_threads: usize| -> Result<Vec<Vec<u32>>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .build();
        let pool = pool.map_err(candle_core::Error::wrap)?;
        let bits_of = |t: &Tensor| Ok(floats(t)?.into_iter().map(f32::to_bits).collect());
        pool.install(|| on_device(&device, &f)?.iter().map(bits_of).collect())
    };
    let one = bits(1)?;
    for run in 0..at_most(1, 2) {
        let three = bits(3)?;
        assert!(one == three, "{what}: other bits in run {run} of 3 threads");
    }
    Ok(())
}
