//! Mistakes in a training loop of one's own, and ranks that are not told the same in a step, are right or a sentence.

use candle_core::{DType, ModuleT, Result, Tensor};
use candle_nn::Init;
use candle_parallel::checkpoint::CheckpointSaver;
use candle_parallel::{
    AdamWConfig, DataParallel, DistributedOptimizer, ParamStore, Pass, Pipeline, PlainBlock,
    Schedule, ZeroStage, plain_block,
};
use serde_json::json;

use crate::chain::{Chain, HIDDEN, local_bits};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, single_mesh};
use crate::mistaken::{Numbers, same, with_block};
use crate::rank::Rank;

/// Trains three steps, of one call for all micro-batches or of one for each.
fn accumulated(
    layout: (usize, usize, usize),
    replicas: DataParallel,
    one_by_one: bool,
) -> Vec<Numbers> {
    on_mesh(layout, |mesh| {
        let mut rank = Rank::chain(&mesh, replicas, DType::F32)?;
        let steps = (0..3).map(|step| {
            let batches = rank.batches(20 * step)?;
            match one_by_one {
                true => batches.chunks(1).try_for_each(|batch| rank.pass(batch))?,
                false => rank.pass(&batches)?,
            }
            rank.update()
        });
        steps.collect()
    })
}

#[test]
fn several_calls_of_forward_backward_add_up() {
    let want = accumulated((1, 1, 1), ZeroStage::Zero.into(), false).remove(0);
    for layout in [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2)] {
        for zero in ZERO_STAGES {
            for overlap in [true, false] {
                let replicas = DataParallel {
                    zero,
                    overlap,
                    ..DataParallel::default()
                };
                let once = accumulated(layout, replicas, true);
                for numbers in &once {
                    same(numbers, &want);
                }
                assert_eq!(
                    once,
                    accumulated(layout, replicas, true),
                    "not the same bits"
                );
            }
        }
    }
}

#[test]
fn a_call_without_micro_batches_adds_nothing() {
    let trained = |layout, zero: ZeroStage, calls_again: bool| {
        let results = on_mesh(layout, |mesh| {
            let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
            let steps = (0..2).map(|step| {
                let batches = rank.batches(20 * step)?;
                rank.pass(&batches)?;
                if calls_again {
                    rank.pass(&[])?;
                }
                rank.update()
            });
            steps.collect::<Result<Numbers>>()
        });
        results.into_iter().next().unwrap()
    };
    for layout in [(1, 1, 1), (1, 2, 1), (1, 2, 2)] {
        for zero in ZERO_STAGES {
            same(&trained(layout, zero, true), &trained(layout, zero, false));
        }
    }
}

#[test]
fn a_pass_that_fails_leaves_nothing_behind() {
    for (layout, zero) in [
        ((1, 1, 1), ZeroStage::One),
        ((1, 1, 2), ZeroStage::One),
        ((1, 2, 1), ZeroStage::One),
        ((1, 2, 1), ZeroStage::Three),
    ] {
        let results = on_mesh(layout, |mesh| {
            let step = |fails: bool| {
                let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
                let batches = rank.batches(1)?;
                if fails {
                    let mut bad = rank.batches(50)?;
                    let last = bad.last_mut().expect("a batch");
                    let beyond = Tensor::full(99u32, (2, 3), last.inputs().device())?;
                    *last = Pass::train(last.inputs().clone(), beyond);
                    assert_says(&message(rank.pass(&bad)), &["99"]);
                }
                rank.pass(&batches)?;
                rank.update()
            };
            Ok((step(false)?, step(true)?))
        });
        for (want, got) in results {
            assert_eq!(want, got);
        }
    }
}

#[test]
fn data_that_differs_from_the_second_step_on_is_found_before_the_passes() {
    for layout in [(2, 1, 1), (1, 1, 2), (2, 2, 2)] {
        for fewer in [false, true] {
            let results = on_mesh(layout, |mesh| {
                let mut rank = Rank::chain(&mesh, ZeroStage::One, DType::F32)?;
                let batches = rank.batches(1)?;
                rank.pass(&batches)?;
                rank.update()?;
                let is_other = mesh.world.rank() + 1 == mesh.world.world_size();
                let mut batches = rank.batches(2)?;
                match (is_other, fewer) {
                    (true, true) => drop(batches.pop()),
                    (true, false) => batches = rank.batches(3)?,
                    _ => {}
                }
                Ok(rank.pass(&batches))
            });
            for result in results {
                assert_says(&message(result), &["different micro-batches", "hint"]);
            }
        }
    }
}

#[test]
fn replicas_that_come_to_have_unequal_numbers_of_micro_batches_do_not_wait_for_each_other() {
    for zero in [ZeroStage::Two, ZeroStage::Three] {
        let results = on_mesh((1, 2, 1), |mesh| {
            let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
            let mut batches = rank.batches(1)?;
            rank.pass(&batches)?;
            rank.update()?;
            if mesh.world.rank() == 1 {
                batches.pop();
            }
            Ok(rank.pass(&batches))
        });
        for result in results {
            assert_says(&message(result), &["unequal numbers of micro-batches"]);
        }
    }
}

#[test]
fn ranks_say_the_same_of_an_update() {
    for layout in [(1, 2, 1), (1, 1, 2), (2, 1, 1)] {
        for (is_lr, is_reduced) in [(true, false), (false, false), (true, true)] {
            let results = on_mesh(layout, |mesh| {
                let mut rank = Rank::chain(&mesh, ZeroStage::Zero, DType::F32)?;
                let batches = rank.batches(1)?;
                rank.pass(&batches)?;
                let other = mesh.world.rank() as f64;
                let (lr, clip) = match is_lr {
                    true => (0.1 + other, 1.0),
                    false => (0.1, 1.0 + other),
                };
                let before = local_bits(&rank.part);
                let said = message(match is_reduced {
                    false => rank.optimizer.step(&mut rank.gradients, lr, Some(clip)),
                    true => {
                        let reduced = rank.gradients.reduce()?;
                        rank.optimizer.step_reduced(reduced, lr, Some(clip))
                    }
                });
                assert_eq!(before, local_bits(&rank.part));
                Ok(said)
            });
            for said in results {
                let what = if is_lr {
                    "the learning rate"
                } else {
                    "the norm to clip to"
                };
                assert_says(&said, &["ranks disagree", what, "on rank 0", "on rank 1"]);
            }
        }
    }
}

#[test]
fn numbers_of_an_update_that_make_no_sense_are_refused_before_it() {
    let numbers = [
        (f64::NAN, Some(1.0), "learning rate is NaN"),
        (-0.1, Some(1.0), "learning rate is -0.1"),
        (f64::INFINITY, None, "learning rate is inf"),
        (0.1, Some(f64::NAN), "clip gradients to is NaN"),
        (0.1, Some(-1.0), "clip gradients to is -1"),
        (0.1, Some(f64::INFINITY), "clip gradients to is inf"),
    ];
    for (lr, clip, words) in numbers {
        on_mesh((1, 2, 1), |mesh| {
            let mut rank = Rank::chain(&mesh, ZeroStage::One, DType::F32)?;
            let before = local_bits(&rank.part);
            let batches = rank.batches(1)?;
            rank.pass(&batches)?;
            let said = message(rank.optimizer.step(&mut rank.gradients, lr, clip));
            assert_says(&said, &[words, "expected", "not updated"]);
            assert_eq!(before, local_bits(&rank.part));
            Ok(())
        });
    }
}

#[test]
fn gradients_and_optimizers_know_whose_they_are() -> Result<()> {
    let mesh = single_mesh();
    let (mut one, mut two) = (
        Rank::chain(&mesh, ZeroStage::One, DType::F32)?,
        Rank::chain(&mesh, ZeroStage::One, DType::F32)?,
    );
    let batches = one.batches(1)?;
    let said = message(
        one.pipeline
            .forward_backward(&one.part, &batches, &mut two.gradients),
    );
    assert_says(&said, &["another model", "hint"]);
    one.pass(&batches)?;
    let said = message(two.optimizer.step(&mut one.gradients, 0.1, None));
    assert_says(&said, &["another model", "hint"]);
    one.update()?;
    Ok(())
}

#[test]
fn a_model_whose_parameters_are_all_frozen_is_not_trained() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(5).freeze(|_| true))?;
    let said = message(DistributedOptimizer::adamw(
        part.params(),
        &mesh,
        AdamWConfig::default(),
    ));
    assert_says(
        &said,
        &["parameters of the model are frozen", "nothing to train"],
    );
    Ok(())
}

/// Drops values at random; with `is_careful` not while the model is evaluated.
struct Dropout {
    scale: Tensor,
    is_careful: bool,
}

impl PlainBlock for Dropout {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let drops = pass.is_training() || !self.is_careful;
        candle_nn::Dropout::new(0.5).forward_t(&xs.broadcast_mul(&self.scale)?, drops)
    }
}

#[test]
fn dropout_while_a_model_is_evaluated_is_refused() {
    for is_careful in [false, true] {
        let results = on_mesh((1, 1, 1), |mesh| {
            let part = with_block(&mesh, ZeroStage::One, |vb| {
                let scale = vb.get(HIDDEN, "scale", Init::Const(1.0))?;
                Ok(plain_block(Dropout { scale, is_careful }))
            })?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let batches = Chain::default().micro_batches(1, 2)?;
            let evaluate = || pipeline.evaluate(&part, batches.iter().cloned().map(Ok));
            Ok((evaluate(), evaluate()))
        });
        for (first, second) in results {
            match is_careful {
                true => assert_eq!(first.unwrap(), second.unwrap()),
                false => {
                    let words = ["block 2 gives other values", "dropout", "is_training"];
                    assert_says(&message(first), &words);
                }
            }
        }
    }
}

#[test]
fn copies_are_compared_before_each_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_mesh((1, 1, 2), |mesh| {
        let rank = Rank::chain(&mesh, ZeroStage::One, DType::F32)?;
        if mesh.tp.rank() == 1 {
            let params = rank.part.params();
            let index = params
                .iter()
                .position(|param| param.name == "layers.1.norm.weight");
            let index = index.expect("a norm");
            params.refill(index, &(params.get(index).values()? * 2.0)?)?;
        }
        let mut saver = CheckpointSaver::new(&mesh.world, folder.path(), 2, None)?;
        Ok(saver.start(&rank.optimizer, 1, json!(null)).map(drop))
    });
    for result in results {
        let words = ["value of parameter layers.1.norm.weight", "checkpoint"];
        assert_says(&message(result), &words);
    }
}
