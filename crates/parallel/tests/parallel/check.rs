//! Random inputs, ranks on a mesh, and comparisons.

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{Device, Result, Shape, Tensor, Var};
use candle_parallel::{DataParallel, ReduceType, ZeroStage, part};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::device::{device, on_ranks_with_delays};

/// Relative L2 error that a sum of f32 in another order may make.
pub const TOLERANCE: f64 = 2e-6;

/// All of them.
pub const ZERO_STAGES: [ZeroStage; 4] = [
    ZeroStage::Zero,
    ZeroStage::One,
    ZeroStage::Two,
    ZeroStage::Three,
];

/// Gradients that can be read after the passes.
pub const UNREDUCED: DataParallel = DataParallel {
    zero: ZeroStage::Zero,
    zero_group: None,
    zero_secondary: None,
    reduce: ReduceType::F32,
    quantize_weights: false,
    tile_linears: 1,
    overlap: false,
};

/// Values in -1..1, a function of the seed and the shape, on the device of this thread.
pub fn random(seed: u64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| rng.random_range(-1f32..1.0))
        .collect();
    Tensor::from_vec(values, shape, &device())
}

/// A variable on the device of this thread.
pub fn var(xs: &Tensor) -> Result<Var> {
    Var::from_tensor(&here(xs)?)
}

/// The values on the device of this thread, by way of the host: candle does not order copies between two GPUs.
pub fn here(xs: &Tensor) -> Result<Tensor> {
    xs.to_device(&Device::Cpu)?.to_device(&device())
}

/// Ids below `bound`.
pub fn random_ids(seed: u64, count: usize, bound: usize) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count)
        .map(|_| rng.random_range(0..bound as u32))
        .collect()
}

pub fn floats(xs: &Tensor) -> Result<Vec<f32>> {
    xs.flatten_all()?.to_vec1()
}

/// The part of dim `dim` that this rank of the group holds, on its device.
pub fn own_part(xs: &Tensor, dim: usize, group: &ProcessGroup) -> Result<Tensor> {
    let range = part(xs.dim(dim)?, group.rank(), group.world_size());
    let part = xs.narrow(dim, range.start, range.len())?.contiguous()?;
    here(&part)
}

/// The gradients of `sum(ys * weights)`.
pub fn grads<const N: usize>(
    ys: &Tensor,
    weights: &Tensor,
    vars: [&Tensor; N],
) -> Result<[Tensor; N]> {
    let weights = here(weights)?;
    let store = (ys * weights)?.sum_all()?.backward()?;
    Ok(vars.map(|var| store.get(var).expect("a gradient").clone()))
}

#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.dims(), want.dims(), "{what}: shape");
    assert_values_close(what, &floats(got).unwrap(), &floats(want).unwrap());
}

/// Asserts that the L2 norm of the difference is at most [`TOLERANCE`] times that of `want`.
#[track_caller]
pub fn assert_values_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = want.iter().map(|b| square(*b)).sum();
    let error = difference.sqrt() / norm.sqrt().max(1e-30);
    assert!(
        error <= TOLERANCE || difference == 0.0,
        "{what}: relative error {error:e}"
    );
}

/// Runs every rank of a mesh of (pp, dp, tp); results in rank order.
pub fn on_mesh<T: Send>(
    (pp, dp, tp): (usize, usize, usize),
    run: impl Fn(Mesh) -> Result<T> + Sync,
) -> Vec<T> {
    on_mesh_with_delays((pp, dp, tp), None, run)
}

/// As [`on_mesh`], with random delays before each operation.
pub fn on_mesh_with_delays<T: Send>(
    (pp, dp, tp): (usize, usize, usize),
    delays: Option<u64>,
    run: impl Fn(Mesh) -> Result<T> + Sync,
) -> Vec<T> {
    let degrees = Degrees { pp, dp, cp: 1, tp };
    on_ranks_with_delays(pp * dp * tp, delays, |world| {
        run(Mesh::new(world, degrees)?)
    })
}

/// A mesh of this thread alone.
pub fn single_mesh() -> Mesh {
    Mesh::new(ProcessGroup::single(device()), Degrees::default()).unwrap()
}

/// The message of something that must fail, without the backtrace that candle may add.
#[track_caller]
pub fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("this must fail"),
        Err(err) => err.to_string(),
    }
}

#[track_caller]
pub fn assert_says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}
