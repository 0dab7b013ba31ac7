//! Random inputs, gradients and comparisons, on the CPU and on a GPU.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_ops::{DeviceChoice, ProductChoice};
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

/// The same with each of the types that operations compute with.
pub fn on_each_device_in_each_type(test: impl Fn(DType) -> Result<()>) -> Result<()> {
    let types = [DType::F32, DType::BF16, DType::F16];
    on_each_device(|| types.into_iter().try_for_each(&test))
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

/// A bound on the error, of the size of f32's on a CPU. On a GPU sums have other orders, and exponentials, logarithms and divisions are
/// exact to some more units in the last place; on a CPU the environment may have chosen products of fewer bits.
fn on_this_device(bound: f64) -> f64 {
    if !device().is_cpu() {
        return 2.0 * bound;
    }
    let choice = ProductChoice::from_env().expect("a way of multiplying");
    let error = choice.unwrap_or(ProductChoice::Fma).f32_error();
    bound * error / ProductChoice::Fma.f32_error()
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

/// The same rounded to a dtype.
pub fn random_var_in(dtype: DType, seed: u64, shape: impl Into<Shape>) -> Result<Var> {
    Var::from_tensor(&in_dtype(&random(seed, shape)?, dtype)?)
}

/// Ids below `bound`.
pub fn random_ids(seed: u64, count: usize, bound: u32) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(0..bound)).collect()
}

/// The values, bf16 and f16 widened.
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
    let (y, dy) = (y.to_dtype(DType::F32)?, dy.to_dtype(DType::F32)?);
    let store = (y * dy)?.sum_all()?.backward()?;
    Ok(vars.map(|var| {
        store
            .get(var)
            .expect("a gradient for each variable")
            .clone()
    }))
}

/// Asserts that a reference's gradients are the slopes of a sum of its values, by each of its inputs.
pub fn assert_slopes<const N: usize>(
    gradients: [Vec<f64>; N],
    inputs: [Vec<f64>; N],
    sum: impl Fn(&[Vec<f64>; N]) -> f64,
) {
    const STEP: f64 = 1e-6;
    for (which, gradient) in gradients.iter().enumerate() {
        for (i, gradient) in gradient.iter().enumerate() {
            let at = |step: f64| {
                let mut inputs = inputs.clone();
                inputs[which][i] += step;
                sum(&inputs)
            };
            let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let error = (gradient - slope).abs();
            assert!(error < 1e-8, "{which} {i}: {gradient} {slope}");
        }
    }
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

/// How many times the tolerance a row's error may be, of the row's own norm or of the usual one, whichever is larger: its values
/// have one position, one head or one id in common, whose roundings may all be large.
const ROW: f64 = 4.0;

/// The same for the error of one value, of the usual size of a value of its row or of all: the largest of some millions of errors
/// is 5 to 6 times the usual one.
const ELEMENT: f64 = 16.0;

/// How far rounding `want` once to a type of 16 bits may move it: half a unit in the last of 8 or 11 significant bits,
/// and half of the smallest f16. For f32 the tolerances count every rounding.
fn last_rounding(dtype: DType, want: f64) -> f64 {
    match dtype {
        DType::BF16 => 1.001 / 256.0 * want.abs(),
        DType::F16 => 1.001 / 2048.0 * want.abs() + 2f64.powi(-25),
        _ => 0.0,
    }
}

/// Asserts that the L2 norm of the difference is at most `tolerance` times that of `want`; and that no row, along the last dim,
/// and no value is off by much more than that. The norm alone cannot see one wrong row among thousands. Values of bf16
/// and f16 may be off by their last rounding besides, so that one that comes earlier is seen.
#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, want: &[f64], tolerance: f64) {
    let (dtype, row_len) = (got.dtype(), got.dims().last().copied().unwrap_or(1).max(1));
    let got = doubles(got).expect("f32 values");
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let tolerance = on_this_device(tolerance);
    let norm = |values: &[f64]| values.iter().map(|x| x.powi(2)).sum::<f64>().sqrt();
    let difference = got.iter().zip(want).map(|(got, want)| {
        let error = got - want;
        let rounding = last_rounding(dtype, *want).min(error.abs());
        error - rounding.copysign(error)
    });
    let difference: Vec<f64> = difference.collect();
    if norm(&difference) == 0.0 {
        return;
    }
    let error = norm(&difference) / norm(want).max(1e-30);
    assert!(error <= tolerance, "{what}: relative error {error:e}");
    // Of a value and of a row of the usual size.
    let value = norm(want) / (want.len() as f64).sqrt();
    let per_row = (row_len as f64).sqrt();
    let rows = difference.chunks(row_len).zip(want.chunks(row_len));
    for (row, (difference, want)) in rows.enumerate() {
        let size = (norm(want) / per_row).max(value);
        let error = norm(difference) / (per_row * size);
        let most = difference.iter().fold(0f64, |most, x| most.max(x.abs())) / size;
        assert!(
            error <= ROW * tolerance,
            "{what}: relative error {error:e} of row {row}"
        );
        assert!(
            most <= ELEMENT * tolerance,
            "{what}: an error of {most:e} of its size in row {row}"
        );
    }
}

/// What `write(dst, add)` leaves in a buffer of f32: `want` over anything, or added to it.
#[track_caller]
pub fn check_into(
    what: &str,
    want: &[f64],
    tolerance: f64,
    write: impl Fn(&Tensor, bool) -> Result<()>,
) -> Result<()> {
    let len = want.len();
    // A view into a larger buffer, whose other values stay.
    let buffer = Tensor::full(f32::NAN, len + 3, &device())?;
    buffer.slice_set(&Tensor::full(7f32, 2, &device())?, 0, 0)?;
    let dst = buffer.narrow(0, 2, len)?;
    write(&dst, false)?;
    assert_close(&format!("{what} set"), &dst, want, tolerance);
    assert_eq!(floats(&buffer)?[..2], [7.0, 7.0]);
    assert!(floats(&buffer)?[len + 2].is_nan());
    let dst = random(8, len)?;
    let sums: Vec<f64> = doubles(&dst)?
        .iter()
        .zip(want)
        .map(|(a, b)| a + b)
        .collect();
    write(&dst, true)?;
    assert_close(&format!("{what} added"), &dst, &sums, tolerance);
    assert!(write(&Tensor::zeros(len + 1, DType::F32, &device())?, true).is_err());
    let err = write(&Tensor::zeros(len, DType::BF16, &device())?, true).unwrap_err();
    assert!(err.to_string().contains("contiguous F32"), "{err}");
    Ok(())
}

#[test]
fn one_wrong_row_or_value_among_many_is_seen() -> Result<()> {
    let (rows, row_len) = (4096, 64);
    let want = vec![1f64; rows * row_len];
    let is_seen = |wrong: std::ops::Range<usize>, by: f32| -> Result<bool> {
        let mut values = vec![1f32; want.len()];
        values[wrong].iter_mut().for_each(|x| *x += by);
        let got = Tensor::from_vec(values, (rows, row_len), &Device::Cpu)?;
        let compare = std::panic::AssertUnwindSafe(|| assert_close("", &got, &want, 0.02));
        Ok(std::panic::catch_unwind(compare).is_err())
    };
    // The norm of the error is at most 1/64 of the whole.
    assert!(is_seen(7 * row_len..8 * row_len, 1.0)?);
    assert!(is_seen(500..501, 0.5)?);
    assert!(!is_seen(0..want.len(), 0.01)?);
    Ok(())
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
