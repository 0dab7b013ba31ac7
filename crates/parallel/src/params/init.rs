//! Initial values of a parameter, as a function of (seed, name) on its global shape.

use candle_core::{Result, Shape, bail};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use rayon::prelude::*;

use crate::placement::Shard;

/// Values drawn from one random stream; fixed, so that they do not depend on the number of threads.
const CHUNK: usize = 1 << 16;

/// The values of the rank's part of a parameter, row-major.
///
/// The whole global tensor is drawn, in chunks with a random stream each, on all threads; the values outside of the shard are
/// dropped as they come. So every layout starts from the same weights, and no rank holds more than its part.
pub(crate) fn init_values(
    seed: u64,
    name: &str,
    shape: &Shape,
    shard: Option<&Shard>,
    init: Init,
) -> Result<Vec<f32>> {
    let seed = seed ^ fnv1a(name);
    let fail = |err: &dyn std::fmt::Display| {
        candle_core::Error::msg(format!(
            "parameter {name}: cannot initialise with {init:?}: {err}"
        ))
    };
    let normal = |mean: f64, std: f64| Normal::new(mean, std).map_err(|err| fail(&err));
    let uniform = |lo: f64, up: f64| Uniform::new_inclusive(lo, up).map_err(|err| fail(&err));
    Ok(match init {
        Init::Const(value) => select(seed, shape, shard, |_| value),
        Init::Randn { mean, stdev } => {
            let dist = normal(mean, stdev)?;
            select(seed, shape, shard, |rng| dist.sample(rng))
        }
        Init::Uniform { lo, up } => {
            let dist = uniform(lo, up)?;
            select(seed, shape, shard, |rng| dist.sample(rng))
        }
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            let fan = fan.for_shape(shape);
            if fan == 0 {
                bail!("parameter {name}: Kaiming initialisation of shape {shape:?} has a fan of 0");
            }
            let std = non_linearity.gain() / (fan as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => {
                    let dist = normal(0.0, std)?;
                    select(seed, shape, shard, |rng| dist.sample(rng))
                }
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * std;
                    let dist = uniform(-bound, bound)?;
                    select(seed, shape, shard, |rng| dist.sample(rng))
                }
            }
        }
    })
}

/// The values of the shard, in order, of all that `draw` gives.
fn select(
    seed: u64,
    shape: &Shape,
    shard: Option<&Shard>,
    draw: impl Fn(&mut ChaCha8Rng) -> f64 + Sync,
) -> Vec<f32> {
    let rng_of = |chunk: usize| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(chunk as u64);
        rng
    };
    let num_values = shape.elem_count();
    let Some(shard) = shard.filter(|shard| shard.len() < shard.global()) else {
        let mut values = vec![0f32; num_values];
        let chunks = values.par_chunks_mut(CHUNK).enumerate();
        chunks.for_each(|(chunk, values)| {
            let mut rng = rng_of(chunk);
            values.fill_with(|| draw(&mut rng) as f32);
        });
        return values;
    };
    let dims = shape.dims();
    let inner: usize = dims[shard.dim() + 1..].iter().product();
    let is_held = |index: usize| shard.held().contains(index / inner % shard.global());
    let chunks = (0..num_values.div_ceil(CHUNK)).into_par_iter();
    let chunks: Vec<Vec<f32>> = chunks
        .map(|chunk| {
            let mut rng = rng_of(chunk);
            let indices = chunk * CHUNK..num_values.min((chunk + 1) * CHUNK);
            let values = indices.map(|index| (index, draw(&mut rng) as f32));
            let held = values.filter(|(index, _)| is_held(*index));
            held.map(|(_, value)| value).collect()
        })
        .collect();
    chunks.concat()
}

/// 64-bit FNV-1a: a hash that is the same on every platform and in every version.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
