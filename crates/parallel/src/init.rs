//! Initial values of a parameter, as a function of (seed, name) on its global shape.

use candle_core::{Result, Shape, bail};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};

use crate::shard::Shard;

/// The values of the rank's part of a parameter, row-major.
///
/// The whole global tensor is drawn and the values outside of the shard are dropped as they come, so that every layout
/// starts from the same weights and no rank holds more than its part.
pub(crate) fn init_values(
    seed: u64,
    name: &str,
    shape: &Shape,
    shard: Option<&Shard>,
    init: Init,
) -> Result<Vec<f32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ fnv1a(name));
    let fail = |err: &dyn std::fmt::Display| {
        candle_core::Error::msg(format!(
            "parameter {name}: cannot initialise with {init:?}: {err}"
        ))
    };
    let normal = |mean: f64, std: f64| Normal::new(mean, std).map_err(|err| fail(&err));
    let uniform = |lo: f64, up: f64| Uniform::new_inclusive(lo, up).map_err(|err| fail(&err));
    Ok(match init {
        Init::Const(value) => select(shape, shard, || value),
        Init::Randn { mean, stdev } => {
            let dist = normal(mean, stdev)?;
            select(shape, shard, || dist.sample(&mut rng))
        }
        Init::Uniform { lo, up } => {
            let dist = uniform(lo, up)?;
            select(shape, shard, || dist.sample(&mut rng))
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
                    select(shape, shard, || dist.sample(&mut rng))
                }
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * std;
                    let dist = uniform(-bound, bound)?;
                    select(shape, shard, || dist.sample(&mut rng))
                }
            }
        }
    })
}

fn select(shape: &Shape, shard: Option<&Shard>, mut draw: impl FnMut() -> f64) -> Vec<f32> {
    let dims = shape.dims();
    let num_values = shape.elem_count();
    let Some(shard) = shard else {
        return (0..num_values).map(|_| draw() as f32).collect();
    };
    let inner: usize = dims[shard.dim + 1..].iter().product();
    let outer: usize = dims[..shard.dim].iter().product();
    let mut values = Vec::with_capacity(outer * shard.len() * inner);
    for _ in 0..outer {
        for index in 0..shard.global {
            let held = shard.range.contains(&index);
            for _ in 0..inner {
                let value = draw() as f32;
                if held {
                    values.push(value);
                }
            }
        }
    }
    values
}

/// 64-bit FNV-1a: a hash that is the same on every platform and in every version.
fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
