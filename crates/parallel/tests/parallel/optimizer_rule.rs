//! An optimizer of one's own, groups of parameters, and state that moves to another layout.

use candle_core::{Result, Tensor, bail};
use candle_parallel::{
    AdamW, AdamWConfig, DistributedOptimizer, Gradients, ModelPart, Optimizer, OptimizerState,
    ParamGroup, ParamSlice, ParamStore, Pipeline, Schedule, UpdateStep, ZeroStage,
};

use crate::chain::{Chain, Values, gather_weights, one_target};
use crate::check::{assert_says, assert_values_close, message, on_mesh, random, single_mesh};

/// v ← 0.9 v + g, θ ← θ − η v, in candle's operations.
pub struct Momentum;

impl Optimizer for Momentum {
    fn state_names(&self) -> &'static [&'static str] {
        &["velocity"]
    }

    fn update(&self, slice: &ParamSlice<'_>, step: &UpdateStep) -> Result<()> {
        let [velocity] = slice.state else {
            bail!("one kind of state was expected")
        };
        for weight in slice.weights {
            let len = weight.values.elem_count();
            let part = |xs: &Tensor| xs.narrow(0, weight.start, len);
            let grad = (part(slice.grad)? * step.grad_scale)?;
            let new = ((part(velocity)? * 0.9)? + grad)?;
            velocity.slice_set(&new, 0, weight.start)?;
            let values = (&weight.values - (new * step.lr)?)?;
            weight.values.slice_set(&values, 0, 0)?;
        }
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

fn accumulate(part: &ModelPart, gradients: &mut Gradients, step: u64) -> Result<()> {
    for (index, param) in part.params().iter().enumerate() {
        let grad = random(100 * step + index as u64, param.local_shape())?;
        gradients.accumulate(index, &grad)?;
    }
    Ok(())
}

#[test]
fn a_rule_of_ones_own_updates_under_zero_1_too() {
    for (dp, zero) in [(1, ZeroStage::Zero), (3, ZeroStage::One)] {
        on_mesh((1, dp, 1), |mesh| {
            let part =
                Chain::default().part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
            let before = part.params().iter().map(|param| param.values()?.copy());
            let before = before.collect::<Result<Vec<_>>>()?;
            let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, Momentum)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            for step in 0..2 {
                accumulate(&part, &mut gradients, step)?;
                optimizer.step(one_target(&mut gradients, &mesh), 0.1, None)?;
            }
            // The sum over the replicas of the same gradients; g0, then 0.9 g0 + g1.
            for (index, (param, before)) in part.params().iter().zip(&before).enumerate() {
                let grad = |step: u64| random(100 * step + index as u64, param.local_shape());
                let moved = ((grad(0)? * 1.9)? + grad(1)?)?;
                let want = (before - (moved * (0.1 * dp as f64))?)?;
                crate::check::assert_close(&param.name, &param.values()?, &want);
            }
            Ok(())
        });
    }
}

#[test]
fn groups_have_learning_rates_and_decays_of_their_own() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(5))?;
    let before = part.params().iter().map(|param| param.values()?.copy());
    let before = before.collect::<Result<Vec<_>>>()?;
    let config = AdamWConfig {
        weight_decay: 0.5,
        ..AdamWConfig::default()
    };
    let groups = vec![
        ParamGroup::new(|name| name.contains("norm")).with_weight_decay(0.2),
        ParamGroup::new(|name| name.starts_with("embed")).with_lr_scale(0.0),
        ParamGroup::new(|name| name.contains("up") || name.contains("norm"))
            .with_lr_scale(3.0)
            .with_weight_decay(0.0),
    ];
    let optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
    let mut optimizer = optimizer.with_groups(groups)?;
    let mut gradients = Gradients::new(part.params(), &mesh)?;
    for (index, param) in part.params().iter().enumerate() {
        let ones = param.values()?.ones_like()?;
        gradients.accumulate(index, &ones)?;
    }
    const LR: f64 = 0.01;
    optimizer.step(one_target(&mut gradients, &mesh), LR, None)?;
    // The first step of AdamW moves by the learning rate along a gradient of one sign.
    for (param, before) in part.params().iter().zip(&before) {
        let is = |part: &str| param.name.contains(part);
        let (lr, decay) = match () {
            () if is("norm") => (LR, 0.2),
            () if is("embed") => (0.0, 0.5),
            () if is("up") => (3.0 * LR, 0.0),
            () if is("bias") => (LR, 0.0),
            () => (LR, 0.5),
        };
        let want = ((before * (1.0 - lr * decay))? - lr)?;
        crate::check::assert_close(&param.name, &param.values()?, &want);
    }
    let bad = vec![ParamGroup::new(|_| true).with_lr_scale(-1.0)];
    let said = message(optimizer.with_groups(bad).map(drop));
    assert_says(&said, &["lr_scale -1", "expected"]);
    Ok(())
}

/// Trains some steps on a layout, from `state` if there is one, and returns whole weights and all state.
fn trained(
    layout: (usize, usize, usize),
    zero: ZeroStage,
    (steps, from): (std::ops::Range<u64>, Option<(&Values, &[OptimizerState])>),
) -> (Values, Vec<OptimizerState>) {
    let all = on_mesh(layout, |mesh| {
        let chain = Chain::default();
        let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
        let rule = AdamW(AdamWConfig::default());
        if let Some((weights, _)) = from {
            load_weights(&part, weights)?;
        }
        let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, rule)?;
        if let Some((_, state)) = from {
            let taken = state.iter().map(|state| optimizer.load_state(state));
            let taken = taken.sum::<Result<usize>>()?;
            let own = optimizer
                .state()?
                .iter()
                .map(|s| s.values.len())
                .sum::<usize>();
            // Replicas and tensor-parallel ranks saved what they share more than once.
            assert!(taken >= own, "{taken} values for {own}");
            optimizer.set_num_steps(steps.start as usize);
        }
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let (rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
        for step in steps.clone() {
            let batches = chain.micro_batches(50 * step, 6)?;
            let batches = &batches[rank * 6 / dp..(rank + 1) * 6 / dp];
            pipeline.forward_backward(&part, batches, &mut gradients)?;
            optimizer.step(&mut gradients, 0.01, Some(1.0))?;
        }
        Ok((gather_weights(&part, &mesh)?, optimizer.state()?))
    });
    let (mut weights, mut state) = (Values::new(), Vec::new());
    for (rank, (of_rank, mut state_of_rank)) in all.into_iter().enumerate() {
        if rank == 0 {
            weights = of_rank;
        }
        state.append(&mut state_of_rank);
    }
    (weights, state)
}

fn load_weights(part: &ModelPart, weights: &Values) -> Result<()> {
    for (index, param) in part.params().iter().enumerate() {
        let whole = Tensor::new(weights[&param.name].as_slice(), &crate::device::device())?;
        let whole = whole.reshape(&param.global_shape)?;
        let mine = match param.shard() {
            None => whole,
            Some(shard) => {
                let ranges = shard.ranges().iter();
                let parts = ranges.map(|range| whole.narrow(shard.dim(), range.start, range.len()));
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, shard.dim())?
            }
        };
        part.params().refill(index, &mine.contiguous()?)?;
    }
    Ok(())
}

#[test]
fn state_goes_on_on_another_layout() {
    let (none, one, two, three) = (
        ZeroStage::Zero,
        ZeroStage::One,
        ZeroStage::Two,
        ZeroStage::Three,
    );
    let (want, want_state) = trained((1, 1, 1), none, (0..4, None));
    for (before, after) in [
        (((1, 1, 1), none), ((1, 3, 2), one)),
        (((1, 3, 2), one), ((1, 1, 1), none)),
        (((3, 2, 1), one), ((1, 2, 3), none)),
        (((1, 2, 3), one), ((2, 3, 1), one)),
        (((1, 3, 2), three), ((1, 2, 1), two)),
        (((1, 2, 1), none), ((2, 3, 1), three)),
    ] {
        let (weights, state) = trained(before.0, before.1, (0..2, None));
        let (got, got_state) = trained(after.0, after.1, (2..4, Some((&weights, &state))));
        for (name, values) in &want {
            let what = format!("{before:?} to {after:?}: {name}");
            assert_values_close(&what, &got[name], values);
        }
        // By value, place by place.
        for whole in &want_state {
            let is_same = |s: &&OptimizerState| (&s.name, &s.kind) == (&whole.name, &whole.kind);
            let mut seen = vec![false; whole.values.len()];
            for part in got_state.iter().filter(is_same) {
                let offsets: Vec<usize> = part.offsets.iter().cloned().flatten().collect();
                let want: Vec<f32> = offsets.iter().map(|&offset| whole.values[offset]).collect();
                let what = format!("{before:?} to {after:?}: {} {}", whole.name, whole.kind);
                assert_values_close(&what, &part.values, &want);
                offsets.into_iter().for_each(|offset| seen[offset] = true);
            }
            assert!(seen.into_iter().all(|seen| seen), "{}", whole.name);
        }
    }
}

#[test]
fn state_of_another_model_is_refused() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(5))?;
    let rule = AdamW(AdamWConfig::default());
    let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, rule)?;
    let mut state = optimizer.state()?.remove(0);
    assert_eq!(
        (state.name.as_str(), state.kind.as_str()),
        ("embed.weight", "exp_avg")
    );
    let num_values = state.values.len();
    state.offsets.clear();
    state.offsets.push(1..num_values + 1);
    let words = ["exp_avg of embed.weight", "[13, 6]", "ends at 78", "hint"];
    assert_says(&message(optimizer.load_state(&state)), &words);
    state.values.pop();
    assert_says(
        &message(optimizer.load_state(&state)),
        &["77 values for 78 offsets"],
    );
    state.offsets = vec![40..77, 0..40];
    assert_says(
        &message(optimizer.load_state(&state)),
        &["offsets 40..77 before 0..40", "rising"],
    );
    Ok(())
}
