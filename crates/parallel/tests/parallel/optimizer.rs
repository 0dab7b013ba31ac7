//! AdamW against plain f64 loops, clipping, and ZeRO-1 against ZeRO-0.

use std::collections::BTreeMap;

use candle_comm::Mesh;
use candle_core::Result;
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, ModelPart, OptimizerState, Param, ParamStore,
    Pipeline, Schedule, ZeroStage,
};

use crate::chain::{Chain, local_bits, one_target};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, random, single_mesh};

const LR: f64 = 0.01;
const STEPS: usize = 5;

/// This data-parallel rank's gradient of parameter `index` in step `step`; the same on tensor-parallel ranks.
fn gradient(part: &ModelPart, dp_rank: usize, step: usize, index: usize) -> candle_core::Tensor {
    let seed = (1000 * step + 100 * dp_rank + index) as u64;
    random(seed, part.params().get(index).local_shape()).unwrap()
}

fn accumulate(part: &ModelPart, mesh: &Mesh, step: usize, gradients: &mut Gradients) -> Result<()> {
    for index in 0..part.params().len() {
        let grad = gradient(part, mesh.dp.rank(), step, index);
        gradients.accumulate(index, &grad)?;
    }
    Ok(())
}

/// One parameter of the reference.
struct Reference {
    values: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    is_matrix: bool,
}

fn references(part: &ModelPart) -> Vec<Reference> {
    let params = part.params();
    params
        .iter()
        .enumerate()
        .map(|(index, param)| {
            let values = params.values(index).unwrap().flatten_all().unwrap();
            let values = values.to_vec1::<f32>().unwrap();
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            Reference {
                m: vec![0.0; values.len()],
                v: vec![0.0; values.len()],
                values,
                is_matrix: param.global_shape.rank() >= 2,
            }
        })
        .collect()
}

/// One step of AdamW in f64 on the sum over the replicas' gradients; the norm before clipping.
fn reference_step(
    part: &ModelPart,
    params: &mut [Reference],
    config: AdamWConfig,
    max_norm: Option<f64>,
    (step, dp): (usize, usize),
) -> f64 {
    let grads: Vec<Vec<f64>> = (0..params.len())
        .map(|index| {
            let mut sum = vec![0f64; params[index].values.len()];
            for rank in 0..dp {
                let grad = gradient(part, rank, step, index).flatten_all().unwrap();
                let grad = grad.to_vec1::<f32>().unwrap();
                sum.iter_mut()
                    .zip(grad)
                    .for_each(|(s, g)| *s += f64::from(g));
            }
            sum
        })
        .collect();
    let norm = grads.iter().flatten().map(|g| g * g).sum::<f64>().sqrt();
    let scale = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
    let AdamWConfig {
        beta1,
        beta2,
        eps,
        weight_decay,
    } = config;
    let t = step as i32 + 1;
    for (param, grads) in params.iter_mut().zip(grads) {
        let decay = if param.is_matrix { weight_decay } else { 0.0 };
        for (i, g) in grads.into_iter().enumerate() {
            let g = g * scale;
            param.m[i] = beta1 * param.m[i] + (1.0 - beta1) * g;
            param.v[i] = beta2 * param.v[i] + (1.0 - beta2) * g * g;
            let (m, v) = (
                param.m[i] / (1.0 - beta1.powi(t)),
                param.v[i] / (1.0 - beta2.powi(t)),
            );
            param.values[i] -= LR * decay * param.values[i];
            param.values[i] -= LR * m / (v.sqrt() + eps);
        }
    }
    norm
}

fn assert_near(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (a, b) in got.iter().zip(want) {
        let error = (f64::from(*a) - b).abs();
        assert!(error <= 1e-6 * b.abs().max(0.1), "{what}: {a} not {b}");
    }
}

#[test]
fn equals_plain_loops_with_and_without_clipping() {
    for (dp, max_norm) in [(1, None), (1, Some(2.0)), (3, Some(3.0)), (2, Some(1e9))] {
        for zero in ZERO_STAGES {
            on_mesh((1, dp, 1), |mesh| {
                let part =
                    Chain::default().part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
                let mut expected = references(&part);
                let config = AdamWConfig {
                    weight_decay: 0.3,
                    ..AdamWConfig::default()
                };
                let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
                let mut gradients = Gradients::new(part.params(), &mesh)?;
                for step in 0..STEPS {
                    accumulate(&part, &mesh, step, &mut gradients)?;
                    let norm = optimizer
                        .step(one_target(&mut gradients, &mesh), LR, max_norm)?
                        .grad_norm;
                    let of = (step, dp);
                    let want = reference_step(&part, &mut expected, config, max_norm, of);
                    assert!((norm - want).abs() < 1e-6 * want, "norm {norm} not {want}");
                }
                assert_eq!(optimizer.num_steps(), STEPS);
                let params = part.params();
                for (index, expected) in expected.iter().enumerate() {
                    let values = params.values(index)?.flatten_all()?.to_vec1::<f32>()?;
                    assert_near(&params.get(index).name, &values, &expected.values);
                }
                for state in optimizer.state()? {
                    let is_it = |param: &Param| param.name == state.name;
                    let index = part.params().iter().position(is_it).unwrap();
                    let want = match state.kind.as_str() {
                        "exp_avg" => &expected[index].m,
                        _ => &expected[index].v,
                    };
                    let offsets = state.offsets.iter().cloned().flatten();
                    let want: Vec<f64> = offsets.map(|offset| want[offset]).collect();
                    assert_near(&state.name, &state.values, &want);
                }
                Ok(())
            });
        }
    }
}

/// A rank's weights, bit by bit, and its optimizer state.
type Trained = (BTreeMap<String, Vec<u32>>, Vec<OptimizerState>);

/// What each rank has after a few steps.
fn trained(layout: (usize, usize, usize), zero: ZeroStage) -> Vec<Trained> {
    on_mesh(layout, |mesh| {
        let part = Chain::default().part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
        let mut optimizer =
            DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        for step in 0..STEPS {
            accumulate(&part, &mesh, step, &mut gradients)?;
            optimizer.step(one_target(&mut gradients, &mesh), LR, Some(1.0))?;
        }
        Ok((local_bits(&part), optimizer.state()?))
    })
}

#[test]
fn replicas_have_the_weights_of_zero_0_and_parts_of_its_state() {
    let layouts = [(1, 2, 1), (1, 3, 1), (1, 4, 2), (2, 3, 1)];
    let stages = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];
    let cases = layouts
        .into_iter()
        .flat_map(|layout| stages.map(|zero| (layout, zero)));
    for ((pp, dp, tp), zero) in cases {
        let whole = trained((pp, dp, tp), ZeroStage::Zero);
        let divided = trained((pp, dp, tp), zero);
        for (rank, ((bits, all), (bits_1, part))) in whole.iter().zip(&divided).enumerate() {
            for (name, values) in bits {
                let floats = |bits: &[u32]| -> Vec<f32> {
                    bits.iter().map(|b| f32::from_bits(*b)).collect()
                };
                let want: Vec<f64> = floats(values).into_iter().map(f64::from).collect();
                assert_near(name, &floats(&bits_1[name]), &want);
            }
            let len =
                |state: &[OptimizerState]| state.iter().map(|s| s.values.len()).sum::<usize>();
            // Two kinds of state of 5 buckets, a block's each, of which each replica has a multiple of 64 values.
            assert!(len(part) <= len(all) / dp + 2 * 5 * 64, "rank {rank}");
        }
        // The parts of the replicas that hold the same weights are the whole.
        for (rank, (_, all)) in whole.iter().enumerate().filter(|(r, _)| (r / tp) % dp == 0) {
            for want in all {
                let is_same =
                    |part: &&OptimizerState| part.name == want.name && part.kind == want.kind;
                let parts = (0..dp).flat_map(|d| &divided[rank + d * tp].1);
                let parts: Vec<_> = parts.filter(is_same).collect();
                let offsets = |state: &OptimizerState| -> Vec<usize> {
                    state.offsets.iter().cloned().flatten().collect()
                };
                let all_offsets: Vec<_> = parts.iter().flat_map(|part| offsets(part)).collect();
                assert_eq!(all_offsets, offsets(want), "{} {}", want.name, want.kind);
                let values = parts.iter().flat_map(|part| &part.values);
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs().max(1e-3);
                assert!(
                    values.zip(&want.values).all(close),
                    "{} {}",
                    want.name,
                    want.kind
                );
            }
        }
    }
}

#[test]
fn replicas_keep_the_same_bits() {
    for zero in ZERO_STAGES {
        let ranks = trained((1, 3, 1), zero);
        assert!(ranks.iter().all(|(bits, _)| *bits == ranks[0].0));
    }
}

#[test]
fn constants_out_of_range_are_errors() {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(1)).unwrap();
    let default = AdamWConfig::default();
    let cases = [
        (
            AdamWConfig {
                beta1: 1.0,
                ..default
            },
            "beta1 is 1",
        ),
        (
            AdamWConfig {
                beta2: -0.1,
                ..default
            },
            "beta2 is -0.1",
        ),
        (
            AdamWConfig {
                eps: 0.0,
                ..default
            },
            "eps is 0",
        ),
        (
            AdamWConfig {
                weight_decay: f64::NAN,
                ..default
            },
            "weight_decay is NaN",
        ),
    ];
    for (config, words) in cases {
        let made = DistributedOptimizer::adamw(part.params(), &mesh, config);
        assert_says(&message(made), &[words, "expected"]);
    }
}

#[test]
fn all_ranks_hear_in_the_same_step_that_one_asks_to_stop() -> Result<()> {
    let chain = Chain::default();
    for asking in [None, Some(0), Some(5)] {
        let heard = on_mesh((2, 2, 2), |mesh| {
            let part = chain.part(&mesh, &ParamStore::init(1))?;
            let config = AdamWConfig::default();
            let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
            let step = |step: u64| {
                let batches = chain.micro_batches(step, 2)?;
                pipeline.forward_backward(&part, &batches, &mut gradients)?;
                if step == 1 && asking == Some(mesh.world.rank()) {
                    gradients.ask_to_stop();
                }
                let report = optimizer.step(&mut gradients, LR, None)?;
                Ok(report.is_asked_to_stop)
            };
            (0..3).map(step).collect::<Result<Vec<_>>>()
        });
        let expected = vec![false, asking.is_some(), false];
        assert_eq!(heard, vec![expected; 8], "{asking:?}");
    }
    Ok(())
}

#[test]
fn a_step_without_gradients_or_with_wrong_shapes_is_an_error() {
    let mesh = single_mesh();
    let part = Chain::default()
        .part(
            &mesh,
            &ParamStore::init(1).with_data_parallel(ZeroStage::Zero),
        )
        .unwrap();
    let config = AdamWConfig::default();
    let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config).unwrap();
    let mut gradients = Gradients::new(part.params(), &mesh).unwrap();
    let said = message(optimizer.step(one_target(&mut gradients, &mesh), LR, None));
    assert_says(&said, &["parameter head.weight got no gradient"]);
    let said = message(gradients.accumulate(0, &random(1, 3).unwrap()));
    assert_says(&said, &["embed.weight", "[3]", "[13, 6]"]);
}
