//! bf16 and f16 weights: f32 masters, gradients in f32, half the bytes, and layouts that agree.

use std::collections::BTreeMap;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor};
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, ModelPart, OptimizerState, ParamStore, Pipeline,
    Schedule, ZeroStage,
};

use crate::chain::{Chain, Values, gather, local_bits, one_target};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, random, single_mesh};
use crate::traffic::{gathered_blocks, padded_buckets};

const STEPS: usize = 4;

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

fn chain(dtype: DType) -> Chain {
    Chain {
        dtype,
        ..Chain::default()
    }
}

/// Any gradient, the same for all types of weights, in f32 and not a value of the others.
fn accumulate(part: &ModelPart, mesh: &Mesh, step: usize, gradients: &mut Gradients) -> Result<()> {
    for (index, param) in part.params().iter().enumerate() {
        let seed = 1000 * step + 100 * mesh.dp.rank() + index;
        gradients.accumulate(index, &random(seed as u64, param.local_shape())?)?;
    }
    Ok(())
}

/// Runs a rank's part with each of the types.
fn on_mesh_with_each(
    layout: (usize, usize, usize),
    rank: impl Fn(Mesh, DType) -> Result<()> + Sync,
) {
    for dtype in NARROW {
        on_mesh(layout, |mesh| rank(mesh, dtype));
    }
}

fn bits(values: &Tensor) -> Result<Vec<u32>> {
    let values = values.flatten_all()?.to_dtype(DType::F32)?;
    Ok(values
        .to_vec1::<f32>()?
        .into_iter()
        .map(f32::to_bits)
        .collect())
}

#[test]
fn masters_are_the_weights_of_training_in_f32_and_weights_are_masters_rounded() {
    for (dp, zero) in [
        (1, ZeroStage::Zero),
        (1, ZeroStage::One),
        (3, ZeroStage::Zero),
        (3, ZeroStage::One),
    ] {
        on_mesh_with_each((1, dp, 1), |mesh, dtype| {
            let store = ParamStore::init(5).with_data_parallel(zero);
            let narrow = chain(dtype).part(&mesh, &store)?;
            let wide = Chain::default().part(&mesh, &ParamStore::init(5))?;
            for part in [&wide, &narrow] {
                let config = AdamWConfig::default();
                let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
                let mut gradients = Gradients::new(part.params(), &mesh)?;
                for step in 0..STEPS {
                    accumulate(part, &mesh, step, &mut gradients)?;
                    optimizer.step(one_target(&mut gradients, &mesh), 0.01, Some(1.0))?;
                }
                let state = optimizer.state()?;
                let masters = state.iter().filter(|state| state.kind == "master");
                let has_masters = part.dtype() == dtype && mesh.dp.rank() == 0;
                assert!(masters.clone().count() > 0 || !has_masters);
                assert!(masters.clone().count() == 0 || part.dtype() == dtype);
                for state in masters {
                    let is_it = |param: &&candle_parallel::Param| param.name == state.name;
                    let param = wide.params().iter().find(is_it).unwrap();
                    let want = bits(&param.values()?)?;
                    let want: Vec<u32> = state
                        .offsets
                        .iter()
                        .flat_map(|o| &want[o.clone()])
                        .copied()
                        .collect();
                    let master: Vec<u32> = state.values.iter().map(|x| x.to_bits()).collect();
                    assert_eq!(master, want, "{} dp {dp} {zero:?}", state.name);
                }
            }
            for (wide, narrow) in wide.params().iter().zip(narrow.params().iter()) {
                assert_eq!(narrow.dtype(), dtype);
                let rounded = wide.values()?.to_dtype(dtype)?;
                assert_eq!(bits(&narrow.values()?)?, bits(&rounded)?, "{}", narrow.name);
            }
            Ok(())
        });
    }
}

#[test]
fn updates_smaller_than_a_step_of_bf16_add_up() -> Result<()> {
    const LR: f64 = 2e-5;
    let mesh = single_mesh();
    let part = chain(DType::BF16).part(&mesh, &ParamStore::init(5))?;
    let config = AdamWConfig {
        weight_decay: 0.0,
        ..AdamWConfig::default()
    };
    let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
    let mut gradients = Gradients::new(part.params(), &mesh)?;
    let is_norm = |param: &&candle_parallel::Param| param.name == "layers.0.norm.weight";
    let norm = part.params().iter().find(is_norm).unwrap();
    // A gradient that stays the same moves a weight by the learning rate; below 1 the values of bf16 are 1/256 apart.
    for num_steps in 1..=400 {
        for (index, param) in part.params().iter().enumerate() {
            gradients.accumulate(
                index,
                &Tensor::ones(param.local_shape(), DType::F32, mesh.world.device())?,
            )?;
        }
        optimizer.step(one_target(&mut gradients, &mesh), LR, None)?;
        let want = 1.0 - LR * num_steps as f64;
        for weight in norm.values()?.to_dtype(DType::F64)?.to_vec1::<f64>()? {
            let error = (weight - want).abs();
            assert!(
                error <= 1.0 / 512.0 + 1e-5,
                "{weight} not {want} after {num_steps} steps"
            );
        }
    }
    Ok(())
}

/// A bf16 weight is a part of its master; f16 ones have masters beside them.
#[test]
fn bf16_weights_that_were_put_in_are_updated() -> Result<()> {
    let mesh = single_mesh();
    for (dtype, put_in) in [
        (DType::F32, 8.0),
        (DType::F16, 8.0),
        (DType::BF16, 8.0),
        (DType::BF16, 0.0),
        (DType::BF16, -0.0),
    ] {
        let part = chain(dtype).part(&mesh, &ParamStore::init(5))?;
        let config = AdamWConfig::default();
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        for (index, param) in part.params().iter().enumerate() {
            let values = Tensor::full(put_in, param.local_shape(), mesh.world.device())?;
            part.params().refill(index, &values.to_dtype(dtype)?)?;
        }
        accumulate(&part, &mesh, 0, &mut gradients)?;
        optimizer.step(one_target(&mut gradients, &mesh), 0.01, Some(1.0))?;
        for param in part.params().iter() {
            let values = param.values()?.flatten_all()?.to_dtype(DType::F32)?;
            for value in values.to_vec1::<f32>()? {
                let goes_on = (value - put_in).abs() < 0.1;
                assert_eq!(goes_on, dtype != DType::F16, "{value} {dtype:?}");
            }
        }
    }
    Ok(())
}

/// To ranks whose weights are others.
#[test]
fn masters_move_to_another_layout() {
    for zero in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Three] {
        let states = on_mesh((1, 2, 1), |mesh| {
            let store = ParamStore::init(5).with_data_parallel(zero);
            let part = chain(DType::BF16).part(&mesh, &store)?;
            let config = AdamWConfig::default();
            let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            accumulate(&part, &mesh, 0, &mut gradients)?;
            optimizer.step(one_target(&mut gradients, &mesh), 0.01, Some(1.0))?;
            optimizer.state()
        });
        let loaded = on_mesh((1, 3, 1), |mesh| {
            let store = ParamStore::init(6).with_data_parallel(ZeroStage::One);
            let part = chain(DType::BF16).part(&mesh, &store)?;
            let config = AdamWConfig::default();
            let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
            for state in states.iter().flatten() {
                optimizer.load_state(state)?;
            }
            optimizer.state()
        });
        assert!(masters(&loaded) == masters(&states), "{zero:?}");
    }
}

/// The bits of each master, by name and place in the parameter.
fn masters(of_ranks: &[Vec<OptimizerState>]) -> BTreeMap<(&str, usize), u32> {
    let mut bits = BTreeMap::new();
    for state in of_ranks
        .iter()
        .flatten()
        .filter(|state| state.kind == "master")
    {
        let places = state.offsets.iter().cloned().flatten();
        for (place, value) in places.zip(&state.values) {
            bits.insert((state.name.as_str(), place), value.to_bits());
        }
    }
    bits
}

/// Values of this rank's buckets: one per block, each replica's part of it padded to 64.
#[test]
fn gradients_move_in_f32_and_weights_and_activations_in_bf16() {
    for zero in ZERO_STAGES {
        on_mesh((2, 3, 1), |mesh| {
            let (chain, dp) = (chain(DType::BF16), 3);
            let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
            let mut optimizer =
                DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
            let batches = chain.micro_batches(mesh.dp.rank() as u64, 2)?;
            mesh.dp.reset_counters();
            mesh.pp.reset_counters();
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            // Two micro-batches of (2, 3, 6) go one way.
            assert_eq!(mesh.pp.counters().bytes("batch_send_recv"), 2 * 36 * 2);
            optimizer.step(one_target(&mut gradients, &mesh), 0.1, Some(1.0))?;
            part.params().wait_for_updates()?;
            let counters = mesh.dp.counters();
            let buckets = padded_buckets(&part, dp, 1);
            let num_values = buckets.iter().map(|(_, len)| len).sum::<usize>();
            let sent = |num_values: usize| (num_values / dp * (dp - 1)) as u64;
            let once = sent(num_values);
            // Of two micro-batches.
            let gathered = gathered_blocks(&part, mesh.pp.rank(), 2)
                .into_iter()
                .map(|block| {
                    let of_block = buckets.iter().find(|bucket| bucket.0 == block);
                    sent(of_block.unwrap().1)
                });
            let (all_reduces, reduce_scatters, gathered) = match zero {
                ZeroStage::Zero => (2, 0, 0),
                ZeroStage::One => (0, 1, once),
                ZeroStage::Two => (0, 2, once),
                ZeroStage::Three => (0, 2, gathered.sum()),
            };
            assert_eq!(counters.bytes("all_reduce"), all_reduces * 4 * once);
            assert_eq!(counters.bytes("reduce_scatter"), reduce_scatters * 4 * once);
            assert_eq!(counters.bytes("all_gather"), 2 * gathered);
            Ok(())
        });
    }
}

/// What rank 0 knows after a step: the loss of rank 0's replica (if it has the last stage), gradients, weights.
fn trained(
    layout: (usize, usize, usize),
    dtype: DType,
    tied: bool,
) -> (Values, Vec<BTreeMap<String, Vec<u32>>>) {
    let ranks = on_mesh(layout, |mesh| {
        let chain = Chain {
            dtype,
            tied,
            ..Chain::default()
        };
        let part = chain.part(&mesh, &ParamStore::init(5))?;
        let config = AdamWConfig::default();
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let (dp, rank) = (mesh.dp.world_size(), mesh.dp.rank());
        let per_rank = 4 / dp;
        let batches = chain.micro_batches(1, 4)?;
        let batches = &batches[rank * per_rank..(rank + 1) * per_rank];
        pipeline.forward_backward(&part, batches, &mut gradients)?;
        let mut reduced = gradients.reduce()?;
        let local = reduced.local_gradients()?;
        let grads = gather(&part, &mesh, |index| Ok(local[&index].clone()))?;
        reduced.clip(1.0)?;
        optimizer.apply(reduced, 0.01)?;
        Ok((grads, local_bits(&part)))
    });
    let mut all = ranks.into_iter();
    let (grads, first) = all.next().unwrap();
    (
        grads,
        std::iter::once(first)
            .chain(all.map(|(_, bits)| bits))
            .collect(),
    )
}

/// Relative L2 distance of two sets of gradients.
fn distance(a: &Values, b: &Values) -> f64 {
    assert!(a.keys().eq(b.keys()) && !a.is_empty());
    let pairs = || a.values().flatten().zip(b.values().flatten());
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = pairs().map(|(a, b)| square(a - b)).sum();
    let norm: f64 = pairs().map(|(_, b)| square(*b)).sum();
    (difference / norm).sqrt()
}

#[test]
fn layouts_agree_up_to_the_roundings_of_their_type() {
    // A value goes through about 6 roundings per layer forward and as many backward, 3 layers and the two ends: 48. Each is
    // off by at most 2^-9 in bf16 and 2^-12 in f16, evenly spread, so that over sqrt(3) on average; they add up like a random walk, in
    // both runs.
    let roundings = (2.0 * 48f64 / 3.0).sqrt();
    for (dtype, tied) in NARROW
        .into_iter()
        .flat_map(|dtype| [(dtype, false), (dtype, true)])
    {
        let rounding = if dtype == DType::BF16 { -9 } else { -12 };
        let tolerance = 2f64.powi(rounding) * roundings;
        let (alone, _) = trained((1, 1, 1), dtype, tied);
        let (wide, _) = trained((1, 1, 1), DType::F32, tied);
        assert!(
            distance(&alone, &wide) <= tolerance,
            "{}",
            distance(&alone, &wide)
        );
        for layout in [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2), (3, 1, 3)] {
            let (grads, bits) = trained(layout, dtype, tied);
            let error = distance(&grads, &alone);
            assert!(error <= tolerance, "{layout:?} tied {tied}: {error}");
            assert_eq!(
                trained(layout, dtype, tied),
                (grads, bits),
                "{layout:?}: two runs differ"
            );
        }
    }
}

#[test]
fn types_that_cannot_be_trained_are_errors_that_name_the_parameter() -> Result<()> {
    let mesh = single_mesh();
    let chain = Chain {
        dtype: DType::F64,
        ..Chain::default()
    };
    let part = chain.part(&mesh, &ParamStore::init(5))?;
    let made = DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default());
    assert_says(
        &message(made),
        &["head.weight", "F64", "expected F32, BF16 or F16"],
    );
    Ok(())
}
