//! What a block in plain candle asks of its pass, and what it tells.

use std::collections::BTreeMap;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Init;
use candle_parallel::{
    AdamWConfig, Block, DistributedOptimizer, GradientSink, Gradients, Loss, ModelPart, Offload,
    ParamBuilder, ParamStore, Pass, Pipeline, PlainBlock, PlainHead, Recompute, Schedule, Shard,
    WEIGHT_INIT, WeightGrad, ZeroStage, head_block, layer_block, plain_block, plain_head, regions,
    vocab_parallel_embedding, vocab_parallel_head,
};

use crate::chain::{Chain, HIDDEN, gather_weights};
use crate::check::{
    UNREDUCED, ZERO_STAGES, assert_close, assert_says, floats, message, on_mesh, random_ids,
    single_mesh,
};
use crate::device::device;

pub const VOCAB: usize = 13;

struct With<F>(F);

impl<F: Fn(&Tensor, &Pass) -> Result<Tensor> + Send + Sync> PlainBlock for With<F> {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.0(xs, pass)
    }
}

pub fn with(forward: impl Fn(&Tensor, &Pass) -> Result<Tensor> + Send + Sync + 'static) -> Block {
    plain_block(With(forward))
}

/// An embedding, the block that `middle` makes, and a head, which share no weight.
fn part(
    mesh: &Mesh,
    store: &ParamStore,
    middle: impl Fn(ParamBuilder) -> Result<Block>,
) -> Result<ModelPart> {
    let vb = store.builder(DType::F32, &device());
    ModelPart::build(mesh, &vb, 3 + mesh.pp.world_size(), HIDDEN, |index, vb| {
        let num_blocks = 3 + mesh.pp.world_size();
        match index {
            0 => Ok(layer_block(vocab_parallel_embedding(
                VOCAB,
                HIDDEN,
                &mesh.tp,
                vb.pp("embed"),
            )?)),
            1 => middle(vb.pp("middle")),
            _ if index + 1 == num_blocks => Ok(head_block(vocab_parallel_head(
                VOCAB,
                HIDDEN,
                &mesh.tp,
                vb.pp("head"),
            )?)),
            _ => {
                let scale = vb.pp(index).get(HIDDEN, "scale", Init::Const(1.5))?;
                Ok(with(move |xs, _| xs.broadcast_mul(&scale)))
            }
        }
    })
}

/// Micro-batches of one sequence each, of all replicas together `num`.
fn batches(mesh: &Mesh, num: usize) -> Result<Vec<Pass>> {
    let own = num / mesh.dp.world_size();
    let first = mesh.dp.rank() * own;
    let ids = |seed| Tensor::from_vec(random_ids(seed, 4, VOCAB), (1, 4), &Device::Cpu);
    let pass = |seed: u64| Ok(Pass::train(ids(2 * seed)?, ids(2 * seed + 1)?));
    (first..first + own)
        .map(|index| pass(index as u64))
        .collect()
}

pub type Trained = (BTreeMap<String, Vec<f32>>, Vec<BTreeMap<String, f64>>);

/// The weights after three steps, and the metrics of each.
pub fn trained(mesh: &Mesh, part: &ModelPart) -> Result<Trained> {
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let config = AdamWConfig::default();
    let mut optimizer = DistributedOptimizer::adamw(part.params(), mesh, config)?;
    let mut metrics = Vec::new();
    for _step in 0..3 {
        pipeline.forward_backward(part, &batches(mesh, 4)?, &mut gradients)?;
        metrics.push(optimizer.step(&mut gradients, 0.05, None)?.metrics);
    }
    Ok((gather_weights(part, mesh)?, metrics))
}

#[test]
fn dropout_of_a_plain_block_is_the_same_on_every_layout() {
    let dropping = |vb: ParamBuilder, tp: ProcessGroup| {
        let scale = vb.get(HIDDEN, "scale", Init::Const(1.0))?;
        Ok(with(move |xs, pass| {
            pass.dropout(&xs.broadcast_mul(&scale)?, 0.3, "middle", &tp)
        }))
    };
    let run = |layout, recompute| {
        let all = on_mesh(layout, |mesh| {
            let store = ParamStore::init(5);
            let part = part(&mesh, &store, |vb| dropping(vb, mesh.tp.clone()))?;
            trained(&mesh, &part.with_recompute(|_| recompute))
        });
        all.into_iter().next().unwrap().0
    };
    let without = on_mesh((1, 1, 1), |mesh| {
        let part = part(&mesh, &ParamStore::init(5), |vb| {
            let scale = vb.get(HIDDEN, "scale", Init::Const(1.0))?;
            Ok(with(move |xs, _| xs.broadcast_mul(&scale)))
        })?;
        Ok(trained(&mesh, &part)?.0)
    });
    let one = run((1, 1, 1), Recompute::None);
    assert!(one != without[0], "nothing was dropped");
    assert!(run((1, 1, 1), Recompute::Full) == one, "other bits");
    for layout in [(2, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2)] {
        let got = run(layout, Recompute::None);
        for (name, values) in &one {
            // Two layouts of pipelines have as many blocks between.
            let Some(got) = got.get(name) else { continue };
            if layout.0 == 1 {
                let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
                assert_close(&format!("{layout:?} {name}"), &tensor(got), &tensor(values));
            }
        }
    }
}

#[test]
fn dropout_keeps_the_mean_and_is_off_outside_of_training() {
    let mesh = single_mesh();
    let seen = std::sync::Arc::<std::sync::Mutex<Vec<f32>>>::default();
    let of_block = seen.clone();
    let part = part(&mesh, &ParamStore::init(5), move |_| {
        let seen = of_block.clone();
        Ok(with(move |xs, pass| {
            let wide = Tensor::ones((1, 4, 4000), DType::F32, xs.device())?;
            *seen.lock().unwrap() =
                floats(&pass.dropout(&wide, 0.2, "wide", ProcessGroup::single(device()))?)?;
            Ok(xs.clone())
        }))
    })
    .unwrap();
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    let one = batches(&mesh, 1).unwrap();
    let mut gradients = Gradients::new(part.params(), &mesh).unwrap();
    pipeline
        .forward_backward(&part, &one, &mut gradients)
        .unwrap();
    let values = std::mem::take(&mut *seen.lock().unwrap());
    let kept = values.iter().filter(|value| **value != 0.0).count();
    assert!(values.iter().all(|value| *value == 0.0 || *value == 1.25));
    assert!((kept as f64 / 16000.0 - 0.8).abs() < 5.0 * (0.16f64 / 16000.0).sqrt());
    pipeline.evaluate(&part, one.into_iter().map(Ok)).unwrap();
    assert!(seen.lock().unwrap().iter().all(|value| *value == 1.0));
    let xs = Tensor::ones((1, 4), DType::F32, &device()).unwrap();
    let (pass, tp) = (Pass::infer(xs.clone()), &mesh.tp);
    for probability in [-0.1, 1.0, f64::NAN] {
        assert_says(
            &message(pass.dropout(&xs, probability, "x", tp)),
            &["dropout x", "expected 0 <= p < 1"],
        );
    }
}

/// A loss that is added, the squares of a weighted input, against the same loss in the gradients of one graph.
#[test]
fn an_added_loss_is_in_the_gradient_and_in_the_metrics_once() {
    let adding = |adds: bool| {
        move |vb: ParamBuilder| {
            let scale = vb.get(HIDDEN, "scale", Init::Const(1.0))?;
            Ok(with(move |xs, pass: &Pass| {
                let ys = xs.broadcast_mul(&scale)?;
                if adds {
                    pass.add_loss("squares", &(ys.sqr()?.sum_all()? * 0.5)?)?;
                }
                pass.report("largest", &ys.detach().abs()?.max_all()?)?;
                Ok(ys)
            }))
        }
    };
    let run = |layout, recompute, adds| {
        let all = on_mesh(layout, |mesh| {
            let part = part(&mesh, &ParamStore::init(5), adding(adds))?;
            trained(&mesh, &part.with_recompute(|_| recompute))
        });
        let first = all[0].1.clone();
        assert!(all.iter().all(|(_, metrics)| *metrics == first));
        all.into_iter().next().unwrap()
    };
    let (plain, metrics) = run((1, 1, 1), Recompute::None, false);
    assert_eq!(Vec::from_iter(metrics[0].keys()), ["largest"]);
    let (one, metrics) = run((1, 1, 1), Recompute::None, true);
    assert!(one["middle.scale"] != plain["middle.scale"]);
    assert_eq!(Vec::from_iter(metrics[0].keys()), ["largest", "squares"]);
    assert!(metrics[0]["squares"] > 0.0 && metrics[0]["largest"] > 0.0);
    let again = run((1, 1, 1), Recompute::Full, true);
    assert!(again == (one.clone(), metrics.clone()), "recomputed");
    for layout in [(1, 2, 1), (1, 1, 2), (1, 2, 2)] {
        let (weights, got) = run(layout, Recompute::None, true);
        for (got, want) in got.iter().zip(&metrics) {
            for (name, want) in want {
                assert!(
                    (got[name] - want).abs() <= 1e-5 * want.abs(),
                    "{layout:?} {name}"
                );
            }
        }
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let (got, want) = (&weights["middle.scale"], &one["middle.scale"]);
        assert_close("scale", &tensor(got), &tensor(want));
    }
}

/// The gradient of 0.5 |s x|² is s x² for each value: one step without other gradients, by hand.
#[test]
fn an_added_loss_has_the_gradient_of_its_formula() {
    let mesh = single_mesh();
    let store = || ParamStore::init(5).with_data_parallel(UNREDUCED);
    let run = |adds: bool, scale: f64| -> Result<Vec<f32>> {
        let part = part(&mesh, &store(), |vb| {
            let scale = vb.get(HIDDEN, "scale", Init::Const(1.0))?;
            Ok(with(move |xs, pass: &Pass| {
                if adds {
                    pass.add_loss(
                        "squares",
                        &(xs.broadcast_mul(&scale)?.sqr()?.sum_all()? * 0.5)?,
                    )?;
                }
                xs.broadcast_mul(&scale)
            }))
        })?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        gradients.set_loss_scale(scale);
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        pipeline.forward_backward(&part, &batches(&mesh, 1)?, &mut gradients)?;
        let index = part
            .params()
            .iter()
            .position(|param| param.name == "middle.scale");
        floats(&gradients.get(index.unwrap())?)
    };
    let (without, with) = (run(false, 1.0).unwrap(), run(true, 1.0).unwrap());
    let (tokens, mesh) = (batches(&mesh, 1).unwrap(), single_mesh());
    let part = part(&mesh, &store(), |_| Ok(with_identity())).unwrap();
    let index = part
        .params()
        .iter()
        .position(|param| param.name == "embed.weight")
        .unwrap();
    let table = part
        .params()
        .values(index)
        .unwrap()
        .to_vec2::<f32>()
        .unwrap();
    let ids = tokens[0]
        .inputs()
        .flatten_all()
        .unwrap()
        .to_vec1::<u32>()
        .unwrap();
    for feature in 0..HIDDEN {
        let want: f32 = ids
            .iter()
            .map(|&id| table[id as usize][feature].powi(2))
            .sum();
        let got = with[feature] - without[feature];
        assert!((got - want).abs() < 1e-5, "{got}, not {want}");
    }
    // And the loss scale is in it.
    let scaled = run(true, 8.0).unwrap();
    for (scaled, plain) in scaled.iter().zip(&with) {
        assert!((scaled - 8.0 * plain).abs() < 1e-4 * scaled.abs().max(1e-3));
    }
}

fn with_identity() -> Block {
    with(|xs, _| Ok(xs.clone()))
}

#[test]
fn a_weight_that_is_used_at_times_may_get_no_gradient_and_an_empty_part_needs_none() {
    for says in [false, true] {
        for zero in ZERO_STAGES {
            let results = on_mesh((1, 2, 1), |mesh| {
                let store = ParamStore::init(5).with_data_parallel(zero);
                let part = part(&mesh, &store, |vb| {
                    let vb = if says { vb.used_at_times() } else { vb };
                    let experts = [
                        vb.get(HIDDEN, "even", Init::Const(1.1))?,
                        vb.get(HIDDEN, "odd", Init::Const(0.9))?,
                    ];
                    Ok(with(move |xs, pass| {
                        let first = pass.inputs().flatten_all()?.get(0)?.to_scalar::<u32>()?;
                        xs.broadcast_mul(&experts[first as usize % 2])
                    }))
                })?;
                Ok(trained(&mesh, &part))
            });
            for result in results {
                match says {
                    true => {
                        result.unwrap();
                    }
                    false => {
                        assert_says(&message(result), &["block 1", "middle.", "used_at_times"])
                    }
                }
            }
        }
    }
    if !device().is_cpu() {
        // candle asks a GPU for no bytes, which is an error to it.
        return;
    }
    let results = on_mesh((1, 1, 2), |mesh: Mesh| {
        let part = part(&mesh, &ParamStore::init(5), |vb| {
            // The second rank has nothing of it.
            let held = |rank: usize| if rank == 0 { 0..HIDDEN } else { HIDDEN..HIDDEN };
            let shard = Shard::of_ranks(0, HIDDEN, &mesh.tp, held);
            let weight = vb.get_placed(HIDDEN, "weight", shard, WEIGHT_INIT)?;
            let tp = mesh.tp.clone();
            Ok(with(move |xs, _| {
                let entered = regions::copy_to_tensor_parallel_region(xs, &tp)?;
                let own = match weight.elem_count() {
                    0 => entered.broadcast_mul(&Tensor::zeros(HIDDEN, DType::F32, xs.device())?)?,
                    _ => entered.broadcast_mul(&weight)?,
                };
                xs + regions::reduce_from_tensor_parallel_region(&own, &tp)?
            }))
        })?;
        trained(&mesh, &part)
    });
    assert_eq!(results[0].0["middle.weight"].len(), HIDDEN);
}

/// A weight that only some micro-batches of the first step use, and none of later ones: what was left of a step counts in no other.
#[test]
fn a_weight_that_few_micro_batches_use_has_their_gradients_alone() {
    let dir = tempfile::tempdir().unwrap();
    let away = Offload {
        gradients: true,
        ..Offload::default()
    };
    let away = away.in_dir(dir.path());
    let run = |layout, zero, offload: &Offload| {
        let all = on_mesh(layout, |mesh: Mesh| {
            let store = ParamStore::init(5).with_data_parallel(zero);
            let store = store.with_offload(offload.clone());
            let part = part(&mesh, &store, |vb| {
                let scale = vb.used_at_times().get(HIDDEN, "scale", Init::Const(1.1))?;
                Ok(with(move |xs, pass| {
                    let first = pass.inputs().flatten_all()?.get(0)?.to_scalar::<u32>()?;
                    match pass.step() == 0 && first % 2 == 0 {
                        true => xs.broadcast_mul(&scale),
                        false => Ok(xs.clone()),
                    }
                }))
            })?;
            trained(&mesh, &part)
        });
        all.into_iter().next().unwrap().0
    };
    let here = Offload::default();
    let one = run((1, 1, 1), ZeroStage::Zero, &here);
    assert!(one["middle.scale"].iter().all(|value| *value != 1.1));
    for zero in ZERO_STAGES {
        let layouts = [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 2, 2)];
        for (layout, offload) in layouts
            .iter()
            .flat_map(|layout| [(*layout, &here), (*layout, &away)])
        {
            let got = run(layout, zero, offload);
            let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
            for (name, want) in &one {
                let what = format!("{layout:?} {zero:?} {offload:?} {name}");
                assert_close(&what, &tensor(&got[name]), &tensor(want));
            }
        }
    }
}

/// Mean squares of features that are no tokens.
struct Regression {
    weight: Tensor,
}

#[test]
fn a_whole_model_is_trained_on_numbers_in_replicas() {
    let run = |layout, zero| {
        let all = on_mesh(layout, |mesh: Mesh| {
            let store = ParamStore::init(5).with_data_parallel(zero);
            let vb = store.builder(DType::F32, &device());
            let part = ModelPart::whole(
                &mesh,
                &vb,
                |vb| {
                    Ok(Regression {
                        weight: vb.get((3, 5), "weight", WEIGHT_INIT)?,
                    })
                },
                |model, pass| {
                    let images = pass.inputs().to_device(model.weight.device())?;
                    let (b, _, _, _) = images.dims4()?;
                    let ys = images.reshape((b, 5))?.matmul(&model.weight.t()?)?;
                    let errors = (ys - pass.targets()?.to_device(model.weight.device())?)?;
                    Ok(Loss::new(errors.sqr()?.sum_all()?, b as f64))
                },
            )?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let config = AdamWConfig::default();
            let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
            let mut losses = Vec::new();
            let own = 4 / mesh.dp.world_size();
            for _step in 0..20 {
                let pass = |index: usize| {
                    let x = |i: usize| ((index * 7 + i * 3) % 11) as f32 / 5.0 - 1.0;
                    let images = Tensor::from_iter((0..10).map(x), &Device::Cpu)?;
                    let targets = Tensor::from_iter((0..6).map(|i| x(i) * 0.5), &Device::Cpu)?;
                    Ok(Pass::train(
                        images.reshape((2, 1, 5, 1))?,
                        targets.reshape((2, 3))?,
                    ))
                };
                let first = mesh.dp.rank() * own;
                let batches: Result<Vec<_>> = (first..first + own).map(pass).collect();
                let batches = batches?;
                pipeline.forward_backward(&part, &batches, &mut gradients)?;
                let report = optimizer.step(&mut gradients, 0.05, None)?;
                assert_eq!(report.loss.num_targets, 8);
                losses.push(report.loss.mean);
            }
            let evaluated = pipeline.evaluate(
                &part,
                [Pass::train(
                    Tensor::ones((1, 1, 5, 1), DType::F32, &Device::Cpu)?,
                    Tensor::zeros((1, 3), DType::F32, &Device::Cpu)?,
                )]
                .map(Ok),
            )?;
            assert_eq!(evaluated.num_targets, 1.0);
            Ok(losses)
        });
        all.into_iter().next().unwrap()
    };
    let one = run((1, 1, 1), ZeroStage::Zero);
    assert!(one[19] < 0.7 * one[0], "{one:?}");
    for zero in ZERO_STAGES {
        for layout in [(1, 2, 1), (1, 4, 1), (1, 2, 2)] {
            for (got, want) in run(layout, zero).iter().zip(&one) {
                assert!(
                    (got - want).abs() <= 1e-5 * want,
                    "{layout:?} {zero:?}: {got}, not {want}"
                );
            }
        }
    }
    let results = on_mesh((2, 1, 1), |mesh| {
        let vb = ParamStore::init(5).builder(DType::F32, &device());
        let whole = ModelPart::whole(
            &mesh,
            &vb,
            |_| Ok(()),
            |_, pass| Ok(Loss::new(pass.inputs().sum_all()?, 1.0)),
        );
        Ok(message(whole.map(|_| ())))
    });
    assert_says(&results[0], &["1 blocks on 2 pipeline stages", "pp = 1"]);
}

/// Counts how often a frozen weight's gradient is computed.
#[test]
fn the_gradient_of_a_frozen_weight_is_dropped_unseen() -> Result<()> {
    let mesh = single_mesh();
    let store = ParamStore::init(5)
        .with_data_parallel(UNREDUCED)
        .freeze(|name| name.contains("frozen"));
    let vb = store.builder(DType::F32, &device());
    let weights = std::cell::RefCell::new(Vec::new());
    let part = ModelPart::build(&mesh, &vb, 2, HIDDEN, |index, vb| {
        if index == 0 {
            weights.replace(vec![
                vb.get(3, "frozen", WEIGHT_INIT)?,
                vb.get(3, "trained", WEIGHT_INIT)?,
            ]);
            return Chain::default().block(0, &mesh.tp, &vb);
        }
        Ok(plain_head(Sum))
    })?;
    let mut gradients = Gradients::new(part.params(), &mesh)?;
    let weights = weights.into_inner();
    let never: WeightGrad = Box::new(|_, _| candle_core::bail!("a frozen weight's gradient"));
    gradients.put(&weights[0], never)?;
    let once: WeightGrad = Box::new(|_, _| candle_core::bail!("run at once"));
    assert_says(&message(gradients.put(&weights[1], once)), &["run at once"]);
    Ok(())
}

struct Sum;

impl PlainHead for Sum {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        Ok(Loss::new(xs.sum_all()?, pass.num_targets()? as f64))
    }
}

#[test]
fn logits_are_of_the_rows_that_are_asked_for_on_every_layout() {
    let logits = |layout, rows: &'static [usize]| {
        let all = on_mesh(layout, |mesh| {
            let part = part(&mesh, &ParamStore::init(5), |_| Ok(with_identity()))?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let pass = Pass::infer(Tensor::from_vec(
                random_ids(1, 12, VOCAB),
                (3, 4),
                &Device::Cpu,
            )?);
            assert_says(
                &message(pipeline.logits(&part, &pass, &[12])),
                &["row 12", "3 x 4"],
            );
            let logits = pipeline.logits(&part, &pass, rows)?;
            assert_eq!(logits.dims(), [rows.len(), VOCAB]);
            floats(&logits)
        });
        assert!(all.iter().all(|of_rank| of_rank == &all[0]));
        all.into_iter().next().unwrap()
    };
    let all = logits((1, 1, 1), &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    for layout in [(1, 1, 1), (1, 1, 3), (1, 2, 1)] {
        let some = logits(layout, &[11, 4]);
        for (got, want) in some
            .iter()
            .zip(all[11 * VOCAB..].iter().chain(&all[4 * VOCAB..5 * VOCAB]))
        {
            assert!((got - want).abs() < 1e-5, "{layout:?}");
        }
    }
    // A pipeline has a block more here.
    let (one, two) = (logits((2, 1, 1), &[3]), logits((2, 1, 2), &[3]));
    assert_eq!(one.len(), two.len());
}
