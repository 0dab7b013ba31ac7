//! A trainer on a model and batches that are nobody's but the test's: any iterator of them, with checkpoints, resuming, evaluation,
//! stopping.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_comm::Mesh;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_parallel::checkpoint::{CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{Loss, ModelPart, ParamStore, Pass, ZeroStage};
use candle_trainer::{
    Checkpoints, Evaluation, LrSchedule, TrainConfig, TrainEvent, Trainer, TrainingRecord,
};
use tempfile::tempdir;

use crate::run::{Layout, launch};

const FEATURES: usize = 5;
const BATCH: usize = 12;

fn config(num_steps: usize) -> TrainConfig {
    TrainConfig::new(LrSchedule::constant(0.05, num_steps))
}

/// Features and the numbers to be learned from them: this replica's share of batch after batch, in micro-batches of two samples.
fn batches(mesh: &Mesh, seed: u64) -> impl Iterator<Item = Result<Vec<Pass>>> + use<> {
    let (rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
    (seed..).map(move |seed| {
        let value = |index: usize| ((seed as usize * 61 + index) as f32 * 1.7).sin();
        let values: Vec<f32> = (0..BATCH * FEATURES).map(value).collect();
        let xs = Tensor::from_vec(values, (BATCH, FEATURES), &Device::Cpu)?;
        let ys = xs.sum_keepdim(1)?.tanh()?;
        let own = (rank * BATCH / dp..(rank + 1) * BATCH / dp).step_by(2);
        own.map(|first| {
            Ok(Pass::train(
                xs.narrow(0, first, 2)?,
                ys.narrow(0, first, 2)?,
            ))
        })
        .collect()
    })
}

fn trainer(mesh: &Mesh, zero: ZeroStage, num_steps: usize) -> Result<Trainer> {
    let store = ParamStore::init(3).with_data_parallel(zero);
    let part = ModelPart::whole(
        mesh,
        &store.builder(DType::F32, &Device::Cpu),
        |vb| candle_nn::linear(FEATURES, 1, vb.pp("map").var_builder()),
        |model, pass| {
            let off = (model.forward(pass.inputs())? - pass.targets()?)?;
            Ok(Loss::new(off.sqr()?.sum_all()?, pass.num_targets()? as f64))
        },
    )?;
    Trainer::new(config(num_steps), mesh, part)
}

fn weights(trainer: &Trainer) -> Result<Vec<f32>> {
    let params = trainer.part().params();
    let all = (0..params.len()).map(|index| params.values(index)?.flatten_all()?.to_vec1());
    Ok(all.collect::<Result<Vec<Vec<f32>>>>()?.concat())
}

fn checkpoints(mesh: &Mesh, dir: &Path, from: Option<&TrainingCheckpoint>) -> Result<Checkpoints> {
    let saver = CheckpointSaver::new(&mesh.world, dir, 2, from)?;
    let is_first = mesh.world.rank() == 0;
    Ok(Checkpoints::new(
        saver,
        Some(2),
        TrainingRecord::default(),
        is_first,
    ))
}

/// What `run` gives on the first rank.
fn on_first<T: Send>(layout: Layout, run: impl Fn(&Mesh) -> Result<T> + Sync) -> T {
    let first = Mutex::new(None);
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let result = run(&mesh)?;
        if mesh.world.rank() == 0 {
            *first.lock().unwrap() = Some(result);
        }
        Ok(())
    })
    .unwrap();
    first.into_inner().unwrap().unwrap()
}

#[test]
fn a_run_over_an_iterator_stops_resumes_and_gives_the_same_bits() {
    let straight = |layout, zero| {
        on_first(layout, |mesh| {
            let mut trainer = trainer(mesh, zero, 7)?;
            let mut losses = Vec::new();
            trainer.train(batches(mesh, 0), |step| {
                losses.push(step.loss);
                assert_eq!((step.num_tokens, step.epoch), (BATCH, None));
                assert_eq!(step.num_positions, BATCH);
                Ok(())
            })?;
            Ok((losses, weights(&trainer)?))
        })
    };
    let (of_one, _) = straight(Layout::new(1, 1, 1), ZeroStage::Zero);
    assert!(of_one[6] < 0.7 * of_one[0], "{of_one:?}");
    for (layout, zero) in [
        (Layout::new(1, 1, 1), ZeroStage::Zero),
        (Layout::new(1, 2, 1), ZeroStage::One),
        (Layout::new(1, 3, 1), ZeroStage::Three),
    ] {
        let (losses, all) = straight(layout, zero);
        for (loss, expected) in losses.iter().zip(&of_one) {
            assert!(
                (loss - expected).abs() < 1e-5 * expected,
                "{losses:?} {of_one:?}"
            );
        }
        let dir = tempdir().unwrap();
        let (first, last) = on_first(layout, |mesh| {
            let num_steps = AtomicUsize::new(0);
            let stops = mesh.world.rank() == 0;
            let counted = std::sync::Arc::new(num_steps);
            let seen = counted.clone();
            let mut first = trainer(mesh, zero, 7)?
                .with_checkpoints(checkpoints(mesh, dir.path(), None)?)
                .with_stop(move || stops && seen.load(Ordering::Relaxed) >= 3);
            let mut losses = Vec::new();
            first.train(batches(mesh, 0), |step| {
                counted.fetch_add(1, Ordering::Relaxed);
                losses.push(step.loss);
                Ok(())
            })?;
            assert!(first.is_stopped());
            drop(first);
            let checkpoint =
                TrainingCheckpoint::open(&mesh.world, &dir.path().join("step-000004"))?;
            let mut short = trainer(mesh, zero, 7)?;
            short.resume(&checkpoint)?;
            let err = short
                .train(batches(mesh, 0).take(2), |_| Ok(()))
                .unwrap_err();
            let said = err.to_string();
            assert!(
                said.contains("ends after 2 of the 4 steps that the run has made"),
                "{said}"
            );
            let mut second = trainer(mesh, zero, 7)?;
            second.resume(&checkpoint)?;
            let mut second =
                second.with_checkpoints(checkpoints(mesh, dir.path(), Some(&checkpoint))?);
            second.train(batches(mesh, 0), |step| {
                losses.push(step.loss);
                Ok(())
            })?;
            Ok((losses, weights(&second)?))
        });
        assert!(
            (first, last) == (losses, all),
            "{layout:?}: a resumed run has other bits"
        );
    }
}

#[test]
fn an_evaluation_over_an_iterator_ends_a_run_that_gets_no_better() {
    let layout = Layout::new(1, 2, 1);
    let (evaluated, num_steps) = on_first(layout, |mesh| {
        let held_out: Vec<Pass> = batches(mesh, 1000).next().unwrap()?;
        let wrong: Vec<Pass> = held_out
            .iter()
            .map(|pass| Ok(Pass::train(pass.inputs().clone(), pass.targets()?.neg()?)))
            .collect::<Result<_>>()?;
        let evaluation = Evaluation::new(move || wrong.clone().into_iter().map(Ok))
            .with_every(Some(1))
            .with_patience(Some(2));
        let mut trainer = trainer(mesh, ZeroStage::One, 50)?.with_evaluation(evaluation);
        let mut losses = Vec::new();
        trainer.train_observed(batches(mesh, 0), |event| {
            if let TrainEvent::Evaluation(metrics) = event {
                losses.push(metrics.eval_loss);
                assert_eq!(
                    (metrics.eval_num_tokens, metrics.eval_accuracy),
                    (BATCH, None)
                );
            }
            Ok(())
        })?;
        assert!(trainer.is_stopped_early());
        Ok((losses, trainer.step()))
    });
    // What is learned makes the opposite worse from the first step on.
    assert_eq!((evaluated.len(), num_steps), (3, 3), "{evaluated:?}");
    assert!(evaluated.is_sorted(), "{evaluated:?}");
}

#[test]
fn data_that_ends_is_an_error_with_the_steps() {
    let said = on_first(Layout::new(1, 2, 1), |mesh| {
        let mut trainer = trainer(mesh, ZeroStage::Zero, 5)?;
        let err = trainer
            .train(batches(mesh, 0).take(3), |_| Ok(()))
            .unwrap_err();
        // Going on with more data is possible.
        trainer.train(batches(mesh, 3), |_| Ok(()))?;
        assert_eq!(trainer.step(), 5);
        Ok(err.to_string())
    });
    assert!(said.contains("the data ends after 3 of 5 steps"), "{said}");
    assert!(said.contains("hint"), "{said}");
}

/// Ranks that were given iterators of different length all say so, instead of waiting for each other; and can go on with more data.
#[test]
fn data_that_ends_on_one_rank_is_an_error_on_each() {
    for layout in [Layout::new(1, 3, 1), Layout::new(1, 1, 2)] {
        launch(layout, |world| {
            let mesh = Mesh::new(world, layout.degrees())?;
            let mut trainer = trainer(&mesh, ZeroStage::Zero, 5)?;
            let num_steps = if mesh.world.rank() == 1 { 2 } else { 9 };
            let given = batches(&mesh, 0).take(num_steps);
            let err = trainer.train(given, |_| Ok(())).unwrap_err();
            let said = err.to_string();
            let expected = "the data of some ranks, [1], ends after 2 of 5 steps";
            assert!(said.contains(expected), "{said}");
            trainer.train(batches(&mesh, 2), |_| Ok(()))?;
            assert_eq!(trainer.step(), 5);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn an_evaluation_of_unequal_length_is_an_error_on_each_rank() {
    for (layout, zero, expected) in [
        (
            Layout::new(1, 1, 2),
            ZeroStage::Zero,
            "ranks 0 and 1 belong to one replica",
        ),
        (
            Layout::new(1, 3, 1),
            ZeroStage::Three,
            "replicas have unequal numbers of micro-batches",
        ),
    ] {
        launch(layout, |world| {
            let mesh = Mesh::new(world, layout.degrees())?;
            let held_out = batches(&mesh, 1000).next().unwrap()?;
            let num_batches = held_out.len() - usize::from(mesh.world.rank() == 1);
            let evaluation =
                Evaluation::new(move || held_out.clone().into_iter().take(num_batches).map(Ok));
            let mut trainer = trainer(&mesh, zero, 5)?.with_evaluation(evaluation);
            let said = trainer.evaluate().unwrap_err().to_string();
            assert!(said.contains(expected), "{said}");
            Ok(())
        })
        .unwrap();
    }
}
