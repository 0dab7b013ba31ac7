//! Loss and accuracy on held-out samples: those of a loop over the logits of one rank, on every layout, and without any effect on training.

use std::sync::Mutex;

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Tensor};
use candle_parallel::{Pass, Pipeline, Schedule, ZeroStage};
use candle_trainer::{
    EvalBatches, EvalMetrics, Evaluation, SampleConfig, Samples, Tokens, TrainEvent, Trainer,
};

use crate::fixture::{Fixture, Run};
use crate::run::{Layout, Variant, batches, gather, launch, load, load_variant};
use crate::tensors::Tensors;

const SEQ_LEN: usize = 9;

fn ids(fixture: &Fixture) -> Vec<u32> {
    let text = fixture.tokens().record(0).unwrap();
    text.ids[..40 * SEQ_LEN].to_vec()
}

/// The samples that are held out: 7 of the 40.
fn samples(fixture: &Fixture) -> Result<Samples> {
    let tokens = Tokens::from_ids(ids(fixture))?;
    let all = Samples::new(&tokens, SampleConfig::new(SEQ_LEN))?;
    let [_, held_out] = all.hold_out(0.18, 3)?;
    assert_eq!(held_out.len(), 7);
    Ok(held_out)
}

/// Mean loss and part of right predictions by a loop over the logits of one rank, in f64.
fn reference(fixture: &Fixture) -> (f64, f64) {
    let samples = samples(fixture).unwrap();
    let result = Mutex::new(None);
    launch(Layout::new(1, 1, 1), |world| {
        let mesh = Mesh::new(world, Layout::new(1, 1, 1).degrees())?;
        let part = load(fixture, &mesh)?;
        let (mut loss, mut num_right, mut num) = (0.0, 0.0, 0.0);
        for index in 0..samples.len() {
            let sample = samples.get(index)?;
            let ids = Tensor::new(sample.input_ids, &Device::Cpu)?;
            let batch = Pass::infer(ids.unsqueeze(0)?);
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let logits = pipeline.logits(&part, &batch, &Vec::from_iter(0..SEQ_LEN))?;
            let logits = logits.to_dtype(DType::F64)?.to_vec2::<f64>()?;
            for (row, &target) in logits.iter().zip(&sample.targets) {
                let max = row.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = row.iter().map(|z| (z - max).exp()).sum();
                loss += max + sum.ln() - row[target as usize];
                let first = row.iter().position(|&z| z == max).unwrap();
                num_right += f64::from(u8::from(first == target as usize));
                num += 1.0;
            }
        }
        *result.lock().unwrap() = Some((loss / num, num_right / num));
        Ok(())
    })
    .unwrap();
    result.into_inner().unwrap().unwrap()
}

fn evaluation(fixture: &Fixture, mesh: &Mesh, micro_batch_size: usize) -> Result<Evaluation> {
    let replica = (mesh.dp.rank(), mesh.dp.world_size());
    let batches = EvalBatches::new(&samples(fixture)?, micro_batch_size, replica)?;
    Ok(Evaluation::new(move || batches.iter()).with_every(Some(1)))
}

fn evaluate(fixture: &Fixture, layout: Layout, micro_batch_size: usize) -> Vec<EvalMetrics> {
    let of_ranks = Mutex::new(Vec::new());
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let part = load_variant(fixture, &mesh, (layout, Variant::default()))?;
        let trainer = Trainer::new(fixture.run.train_config(layout), &mesh, part)?;
        let mut trainer = trainer.with_evaluation(evaluation(fixture, &mesh, micro_batch_size)?);
        let metrics = trainer.evaluate()?.unwrap();
        of_ranks.lock().unwrap().push(metrics);
        Ok(())
    })
    .unwrap();
    of_ranks.into_inner().unwrap()
}

#[test]
fn every_sample_counts_once_on_every_layout() {
    let layout = |(pp, dp, tp), zero| Layout {
        zero,
        ..Layout::new(pp, dp, tp)
    };
    let layouts = [
        (layout((1, 1, 1), ZeroStage::Zero), 4),
        (layout((1, 1, 3), ZeroStage::Zero), 1),
        (layout((2, 1, 2), ZeroStage::Zero), 3),
        (layout((1, 2, 1), ZeroStage::One), 2),
        (layout((1, 3, 1), ZeroStage::Two), 5),
        (layout((2, 2, 2), ZeroStage::Three), 1),
        (
            Layout {
                tile_linears: 3,
                ..layout((1, 2, 2), ZeroStage::Three)
            },
            2,
        ),
        // The last replica has a round of one token without a target, so one context-parallel rank of it has no rows.
        (
            Layout {
                cp: 2,
                tile_linears: 4,
                ..layout((1, 2, 1), ZeroStage::Three)
            },
            1,
        ),
        (
            Layout {
                cp: 3,
                tile_linears: 2,
                ..layout((1, 2, 2), ZeroStage::Three)
            },
            1,
        ),
        (
            Layout {
                cp: 2,
                ..layout((2, 2, 1), ZeroStage::Three)
            },
            1,
        ),
        (
            Layout {
                cp: 2,
                ..layout((1, 2, 2), ZeroStage::One)
            },
            1,
        ),
    ];
    for name in ["gqa", "tied_bias"] {
        let fixture = Fixture::new(name);
        let (loss, accuracy) = reference(&fixture);
        for (layout, micro_batch_size) in layouts {
            for metrics in evaluate(&fixture, layout, micro_batch_size) {
                let what = format!("{name} {layout:?}: {metrics:?}, expected {loss} {accuracy}");
                assert!((metrics.eval_loss - loss).abs() < 1e-5 * loss, "{what}");
                assert!(
                    (metrics.eval_perplexity.ln() - loss).abs() < 1e-5 * loss,
                    "{what}"
                );
                assert_eq!(metrics.eval_accuracy, Some(accuracy), "{what}");
                assert_eq!(metrics.eval_num_tokens, 7 * SEQ_LEN, "{what}");
            }
        }
    }
}

/// Losses and weights of a run that is evaluated after each step, or not at all.
fn train(fixture: &Fixture, layout: Layout, evaluates: bool) -> (Vec<f64>, Tensors, usize) {
    let run = Run {
        steps: 3,
        ..fixture.run.clone()
    };
    let result = Mutex::new(None);
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let part = load_variant(fixture, &mesh, (layout, Variant::default()))?;
        let mut trainer = Trainer::new(run.train_config(layout), &mesh, part)?;
        if evaluates {
            trainer = trainer.with_evaluation(evaluation(fixture, &mesh, 2)?);
        }
        let (mut losses, mut num_evaluations) = (Vec::new(), 0);
        trainer.train_observed(&batches(fixture, &run, &mesh)?, |event| {
            match event {
                TrainEvent::Step(step) => losses.push(step.loss),
                TrainEvent::Evaluation(_) => num_evaluations += 1,
                _ => {}
            }
            Ok(())
        })?;
        let part = trainer.part();
        let weights = gather(part, &mesh, |index| part.params().values(index))?;
        if mesh.world.rank() == 0 {
            *result.lock().unwrap() = Some((losses, weights, num_evaluations));
        }
        Ok(())
    })
    .unwrap();
    result.into_inner().unwrap().unwrap()
}

#[test]
fn training_does_not_notice() {
    let fixture = Fixture::new("gqa");
    for (layout, zero) in [
        ((1, 1, 1), ZeroStage::Zero),
        ((2, 2, 1), ZeroStage::One),
        ((1, 2, 2), ZeroStage::Three),
    ] {
        let (pp, dp, tp) = layout;
        let layout = Layout {
            zero,
            ..Layout::new(pp, dp, tp)
        };
        let (losses, weights, num_evaluations) = train(&fixture, layout, true);
        assert_eq!(num_evaluations, 3);
        let (want, want_weights, none) = train(&fixture, layout, false);
        assert_eq!((losses, none), (want, 0), "{layout:?}");
        assert!(weights == want_weights, "{layout:?}");
    }
}
