//! Random inputs, gradients and comparisons.

use candle_core::{Device, Result, Shape, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Values in -1..1, a function of the seed and the shape.
pub fn random(seed: u64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| rng.random_range(-1f32..1.0))
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
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

pub fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
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
    let difference: f64 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = want.iter().map(|x| x.powi(2)).sum();
    let error = difference.sqrt() / norm.sqrt().max(1e-30);
    assert!(
        error <= tolerance || difference == 0.0,
        "{what}: relative error {error:e}"
    );
}

/// Runs `f` in pools of 1 and 3 threads, in the latter twice, and compares every bit of what it returns.
pub fn assert_same_bits(what: &str, f: impl Fn() -> Result<Vec<Tensor>> + Sync) -> Result<()> {
    let bits = |num_threads: usize| -> Result<Vec<Vec<u32>>> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .build();
        let pool = pool.map_err(candle_core::Error::wrap)?;
        let bits_of = |t: &Tensor| Ok(floats(t)?.into_iter().map(f32::to_bits).collect());
        pool.install(|| f()?.iter().map(bits_of).collect())
    };
    let one = bits(1)?;
    for run in 0..2 {
        let three = bits(3)?;
        assert!(one == three, "{what}: other bits in run {run} of 3 threads");
    }
    Ok(())
}
