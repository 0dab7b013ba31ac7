//! Ranks compare more than the model: rule, schedule, what a program says of a step, and the
//! weights that it writes.

use std::time::{Duration, Instant};

use candle_comm::{Mesh, launch};
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_parallel::checkpoint::{CheckpointSaver, HfSave, save_hf};
use candle_parallel::{
    AdamW, AdamWConfig, Block, DataParallel, DistributedOptimizer, Layer, Loss, ParamBuilder,
    ParamGroup, ParamStore, Pass, Pipeline, PlainBlock, PlainHead, Recompute, RowParallelLinear,
    Schedule, Shard, WEIGHT_INIT, ZeroStage, column_parallel_linear, plain_block, plain_head,
    regions,
};
use serde_json::json;

use crate::chain::{Chain, HIDDEN};
use crate::check::{assert_says, message, on_mesh, single_mesh};
use crate::mistaken::{build, same, train, train_on, with_block};
use crate::optimizer_rule::Momentum;
use crate::rank::{Rank, adamw};

const TWO_RANKS: [(usize, usize, usize); 3] = [(1, 2, 1), (1, 1, 2), (2, 1, 1)];

/// AdamW, with another constant where `is_other`.
fn other_beta(is_other: bool) -> AdamW {
    AdamW(AdamWConfig {
        beta1: if is_other { 0.5 } else { 0.9 },
        ..AdamWConfig::default()
    })
}

#[test]
fn another_constant_or_rule_of_the_optimizer_on_one_rank_is_an_error() {
    for layout in TWO_RANKS {
        for zero in [ZeroStage::Zero, ZeroStage::One] {
            for case in 0..3 {
                let results = on_mesh(layout, |mesh| {
                    let is_other = mesh.world.rank() == 1;
                    let store = ParamStore::init(5).with_data_parallel(zero);
                    let part = Chain::default().part(&mesh, &store)?;
                    let mut rank = match (case, is_other) {
                        (0, _) => Rank::new(&mesh, part, other_beta(is_other))?,
                        (1, true) => Rank::new(&mesh, part, Momentum)?,
                        _ => Rank::new(&mesh, part, adamw())?,
                    };
                    if case == 2 {
                        let group = ParamGroup::new(|name| name.ends_with("weight"));
                        let group = group.with_rule(other_beta(is_other));
                        rank.optimizer = rank.optimizer.with_groups(vec![group])?;
                    }
                    Ok(rank.step(1))
                });
                let words = match case {
                    0 => ["the optimizer's rule", "beta1: 0.9", "beta1: 0.5"],
                    1 => ["the optimizer's rule", "AdamW", "Momentum"],
                    _ => ["the groups of parameters", "beta1: 0.9", "beta1: 0.5"],
                };
                for result in results {
                    let said = message(result);
                    assert_says(&said, &words);
                    assert_says(&said, &["ranks disagree", "on rank 0", "on rank 1", "hint"]);
                }
            }
        }
    }
}

#[test]
fn a_number_of_targets_that_one_rank_is_not_told_is_an_error() {
    for layout in TWO_RANKS {
        let results = on_mesh(layout, |mesh| {
            let mut rank = Rank::chain(&mesh, ZeroStage::Zero, DType::F32)?;
            rank.pass_of(1)?;
            if mesh.world.rank() == 1 {
                rank.gradients.set_num_targets(10);
            }
            Ok(rank.update())
        });
        for result in results {
            assert_says(
                &message(result),
                &[
                    "set_num_targets",
                    "10 on rank 1",
                    "nothing on rank 0",
                    "hint",
                ],
            );
        }
    }
    // Replicas have numbers of their own, the ranks of a replica have not.
    for (layout, is_error) in [((1, 2, 1), false), ((1, 1, 2), true), ((2, 1, 1), true)] {
        let results = on_mesh(layout, |mesh| {
            let mut rank = Rank::chain(&mesh, ZeroStage::Zero, DType::F32)?;
            rank.pass_of(1)?;
            rank.gradients.set_num_targets(10 + mesh.world.rank());
            Ok(rank.update())
        });
        for result in results {
            if is_error {
                assert_says(&message(result), &["10 on rank 0", "11 on rank 1"])
            } else {
                result.unwrap();
            }
        }
    }
}

#[test]
fn schedules_that_differ_are_said_before_ranks_wait_for_each_other() {
    let cases = [((2, 1, 1), ZeroStage::One), ((2, 2, 1), ZeroStage::Three)];
    for (layout, zero) in cases {
        let results = on_mesh(layout, |mesh| {
            let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
            if mesh.world.rank() == 1 {
                rank.pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            }
            Ok(rank.step(1))
        });
        for result in results {
            assert_says(
                &message(result),
                &["other schedules", "ranks 0 and", "hint"],
            );
        }
    }
}

#[test]
fn recomputing_on_one_rank_alone_is_said_to_be_that() {
    let results = on_mesh((1, 1, 2), |mesh| {
        let mut rank = Rank::chain(&mesh, ZeroStage::One, DType::F32)?;
        let is_other = mesh.tp.rank() == 1;
        rank.part = rank.part.with_recompute(|_| {
            if is_other {
                Recompute::Full
            } else {
                Recompute::None
            }
        });
        Ok(rank.step(1))
    });
    for result in results {
        assert_says(
            &message(result),
            &["ranks 0 and 1", "recompute other blocks", "with_recompute"],
        );
    }
}

struct With<F>(F);

impl<F: Fn(&Tensor, &Pass) -> Result<Tensor> + Send + Sync> PlainBlock for With<F> {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.0(xs, pass)
    }
}

/// A block's own operations in the region of its two parallel layers, and after it.
type Use = fn(&Inner<'_>) -> Result<Tensor>;

struct Inner<'a> {
    mesh: &'a Mesh,
    pass: &'a Pass,
    /// (b, t, own)
    inside: Tensor,
    down: &'a RowParallelLinear,
}

impl Inner<'_> {
    fn leave(&self, inside: &Tensor) -> Result<Tensor> {
        self.down.apply(inside, self.pass)
    }
}

/// A parallel pair of linear layers of which `uses` makes the output.
fn pair(mesh: &Mesh, vb: &ParamBuilder, uses: Use) -> Result<Block> {
    let shard = Shard::even(0, 8, &mesh.tp)?;
    let up = column_parallel_linear(HIDDEN, 8, false, &mesh.tp, vb.pp("up"))?;
    let weight = vb.get_placed((HIDDEN, 8), "down", shard.along(1), WEIGHT_INIT)?;
    let down = RowParallelLinear::new(weight, None, mesh.tp.clone());
    let mesh = mesh.clone();
    Ok(plain_block(With(move |xs: &Tensor, pass: &Pass| {
        let inside = up.apply(xs, pass)?.tanh()?;
        xs + uses(&Inner {
            mesh: &mesh,
            pass,
            inside,
            down: &down,
        })?
    })))
}

#[test]
fn a_loss_that_tensor_parallel_ranks_do_not_add_alike_is_named() {
    let uses: [(Use, &str); 2] = [
        (
            |inner| {
                inner
                    .pass
                    .add_loss("aux", &inner.inside.sqr()?.sum_all()?)?;
                inner.leave(&inner.inside)
            },
            "the loss aux differs between ranks 0 and 1",
        ),
        (
            |inner| {
                let out = inner.leave(&inner.inside)?;
                if inner.mesh.tp.rank() == 1 {
                    inner.pass.add_loss("aux", &out.sqr()?.sum_all()?)?;
                }
                Ok(out)
            },
            "the loss aux is added on rank 1 and not on rank 0",
        ),
    ];
    for (uses, words) in uses {
        let results = on_mesh((1, 1, 2), |mesh| {
            let part = with_block(&mesh, ZeroStage::One, |vb| pair(&mesh, &vb, uses))?;
            Ok(train(&mesh, &part, 1))
        });
        for result in results {
            assert_says(&message(result), &[words, "region", "hint"]);
        }
    }
    // Outside, and summed, all ranks have the same.
    let uses: Use = |inner| {
        let sum = inner.inside.sqr()?.sum_all()?;
        let sum = regions::reduce_from_tensor_parallel_region(&sum, &inner.mesh.tp)?;
        inner.pass.add_loss("aux", &sum)?;
        let out = inner.leave(&inner.inside)?;
        inner.pass.report("out", &out.mean_all()?)?;
        Ok(out)
    };
    let trained = |layout| {
        on_mesh(layout, |mesh| {
            let part = with_block(&mesh, ZeroStage::One, |vb| pair(&mesh, &vb, uses))?;
            train(&mesh, &part, 4)
        })
    };
    let want = trained((1, 1, 1)).remove(0);
    trained((1, 1, 2)).iter().for_each(|got| same(got, &want));
}

#[test]
fn a_number_that_tensor_parallel_ranks_report_differently_is_the_first_one_s() {
    let uses: [Use; 2] = [
        |inner| {
            if inner.mesh.tp.rank() == 0 {
                let own = Tensor::new(0f32, inner.inside.device())?;
                inner.pass.report("aux", &own)?;
            }
            inner.leave(&inner.inside)
        },
        |inner| {
            let own = Tensor::new(inner.mesh.tp.rank() as f32, inner.inside.device())?;
            inner.pass.report("aux", &own)?;
            inner.leave(&inner.inside)
        },
    ];
    for uses in uses {
        on_mesh((1, 1, 2), |mesh| {
            let part = with_block(&mesh, ZeroStage::One, |vb| pair(&mesh, &vb, uses))?;
            let mut rank = Rank::new(&mesh, part, adamw())?;
            for seed in 0..2 {
                rank.pass_of(seed)?;
                let report = rank.optimizer.step(&mut rank.gradients, 0.05, None)?;
                assert_eq!(report.metrics.get("aux"), Some(&0.0));
            }
            Ok(())
        });
    }
}

#[test]
fn regions_that_are_entered_or_left_twice_are_named_with_the_block() {
    let uses: [(Use, &[&str]); 4] = [
        (
            |inner| {
                let inside = &inner.inside;
                inner.leave(&inner.pass.dropout(inside, 0.5, "inner", &inner.mesh.tp)?)
            },
            &["input of a region in block 2 differs between ranks 0 and 1"],
        ),
        (
            |inner| {
                let out = inner.leave(&inner.inside)?;
                regions::reduce_from_tensor_parallel_region(&out, &inner.mesh.tp)
            },
            &[
                "what leaves a region is the same on all 2",
                "2 times too large",
            ],
        ),
        (
            |inner| {
                let inside =
                    regions::copy_to_tensor_parallel_region(&inner.inside, &inner.mesh.tp)?;
                inner.leave(&inside)
            },
            &["input of a region in block 2 differs between ranks 0 and 1"],
        ),
        (
            |inner| {
                let out = inner.leave(&inner.inside)?;
                regions::copy_to_tensor_parallel_region(&out, &inner.mesh.tp)
            },
            &["gradient of what enters a region is the same on all 2"],
        ),
    ];
    for (uses, words) in uses {
        let results = on_mesh((1, 1, 2), |mesh| {
            let part = with_block(&mesh, ZeroStage::One, |vb| pair(&mesh, &vb, uses))?;
            // What is summed twice is the same on all ranks in each of the first three steps.
            Ok(train_on((8, 12), &mesh, &part, 3))
        });
        for result in results {
            let said = message(result);
            assert_says(&said, words);
            assert_says(&said, &["block 2", "hint"]);
        }
    }
}

#[test]
fn equal_summands_that_say_nothing_of_a_model_are_no_error() {
    let uses: [Use; 3] = [
        // Each rank has counted as many.
        |inner| {
            let counts = (inner.inside.zeros_like()? + 1.0)?;
            let counts = regions::reduce_from_tensor_parallel_region(&counts, &inner.mesh.tp)?;
            inner.leave(&(&inner.inside * counts)?)
        },
        // A router of zeros gives all experts the same.
        |inner| {
            let logits = (&inner.inside * 0.0)?;
            let shares = candle_nn::ops::softmax(&logits, 2)?;
            let shares = regions::reduce_from_tensor_parallel_region(&shares, &inner.mesh.tp)?;
            inner.leave(&(&inner.inside * shares)?)
        },
        // Experts that begin as copies of one, and come to differ.
        |inner| {
            let out = inner.leave(&inner.inside)?;
            let scale = if inner.mesh.tp.rank() == 1 && inner.pass.step() > 1 {
                0.5
            } else {
                1.0
            };
            let sum = (out.detach() * scale)?;
            let sum = regions::reduce_from_tensor_parallel_region(&sum, &inner.mesh.tp)?;
            out + (sum * 0.1)?
        },
    ];
    for uses in uses {
        let trained = on_mesh((1, 1, 2), |mesh| {
            let part = with_block(&mesh, ZeroStage::One, |vb| pair(&mesh, &vb, uses))?;
            train_on((8, 12), &mesh, &part, 4)
        });
        same(&trained[0], &trained[1]);
    }
}

#[test]
fn a_pattern_that_freezes_nothing_is_an_error() {
    for layout in [(1, 1, 1), (1, 2, 1), (2, 1, 1)] {
        let results = on_mesh(layout, |mesh| {
            let store = ParamStore::init(5).freeze(|name| name.starts_with("model.layers"));
            Ok(Chain::default().part(&mesh, &store).map(drop))
        });
        for result in results {
            let words = ["matches none of the", "embed.weight", "hint"];
            assert_says(&message(result), &words);
        }
    }
    // What it freezes may be on one stage only, but each rank must say so.
    for freezes in [[true, true], [true, false]] {
        let results = on_mesh((2, 1, 1), |mesh| {
            let is_on = freezes[mesh.pp.rank()];
            let store = ParamStore::init(5);
            let store = store.freeze(move |name| is_on && name == "embed.weight" || name == "none");
            Ok(Chain::default().part(&mesh, &store).map(drop))
        });
        match freezes[1] {
            true => results.into_iter().for_each(|result| result.unwrap()),
            false => {
                let said = message(results.into_iter().nth(1).unwrap());
                assert_says(
                    &said,
                    &["embed.weight", "frozen by what one rank says", "hint"],
                );
            }
        }
    }
}

#[test]
fn optimizers_that_take_turns_at_the_weights_of_a_model_are_refused() -> Result<()> {
    let mesh = single_mesh();
    let store = ParamStore::init(5);
    let mut rank = Rank::new(&mesh, Chain::default().part(&mesh, &store)?, adamw())?;
    rank.step(1)?;
    // One in the place of another, which lives until then.
    for seed in 2..4 {
        rank.optimizer = DistributedOptimizer::new(rank.part.params(), &mesh, adamw())?;
        rank.optimizer = rank.optimizer.with_groups(Vec::new())?;
        rank.step(seed)?;
    }
    // One that has made no update since, and that makes one.
    let fresh = DistributedOptimizer::new(rank.part.params(), &mesh, adamw())?;
    let mut first = std::mem::replace(&mut rank.optimizer, fresh);
    rank.step(4)?;
    std::mem::swap(&mut rank.optimizer, &mut first);
    let said = message(rank.step(5));
    let words = [
        "two living optimizers",
        "parameter",
        "drop(optimizer)",
        "hint",
    ];
    assert_says(&said, &words);
    drop(first);
    rank.step(6)?;
    // Another model of the store has the same parameters.
    let mut other = Rank::new(&mesh, Chain::default().part(&mesh, &store)?, adamw())?;
    rank.step(7)?;
    assert_says(&message(other.step(8)), &words);
    Ok(())
}

#[test]
fn replicas_whose_weights_differ_are_not_saved() {
    let grouped = DataParallel {
        zero: ZeroStage::Three,
        zero_group: Some(2),
        ..DataParallel::default()
    };
    for (dp, replicas) in [(2, ZeroStage::Zero.into()), (4, grouped)] {
        for is_checkpoint in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let results = on_mesh((1, dp, 1), |mesh| {
                let rank = Rank::chain(&mesh, replicas, DType::F32)?;
                let params = rank.part.params();
                for index in 0..params.len() {
                    let values = (params.values(index)? + 1.0)?;
                    if mesh.dp.rank() == dp / 2 {
                        params.refill(index, &values)?;
                    }
                }
                if is_checkpoint {
                    let mut saver = CheckpointSaver::new(&mesh.world, folder.path(), 2, None)?;
                    return Ok(saver.start(&rank.optimizer, 1, json!(null)).map(drop));
                }
                let save = HfSave::new(folder.path().join("out"), Vec::new());
                Ok(save_hf(params, &mesh, &save))
            });
            for result in results {
                let words = ["value of parameter", "data-parallel ranks", "saved", "hint"];
                assert_says(&message(result), &words);
            }
        }
    }
}

#[test]
fn a_model_that_one_rank_saves_alone_is_said_at_once() {
    for (layout, zero) in [
        ((1, 1, 2), ZeroStage::One),
        ((1, 2, 1), ZeroStage::Zero),
        ((1, 2, 1), ZeroStage::One),
        ((1, 2, 1), ZeroStage::Three),
        ((2, 1, 1), ZeroStage::One),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let started = Instant::now();
        let (pp, dp, tp) = layout;
        let degrees = candle_comm::Degrees { pp, dp, cp: 1, tp };
        let said = message(launch::threads(2, |world| {
            let mesh = Mesh::new(world, degrees)?;
            let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
            rank.step(1)?;
            if mesh.world.rank() == 0 {
                let save = HfSave::new(folder.path().join("out"), Vec::new());
                rank.optimizer.save_hf(&save)?;
            }
            rank.step(2)
        }));
        assert_says(&said, &["every rank's call", "if rank == 0"]);
        assert!(started.elapsed() < Duration::from_secs(60), "{said}");
    }
}

#[test]
fn a_micro_batch_without_values_is_evaluated_and_not_trained_on() {
    for shape in [(0, 3), (2, 0)] {
        let results = on_mesh((1, 1, 1), |mesh| {
            let mut rank = Rank::chain(&mesh, ZeroStage::One, DType::F32)?;
            let none = Tensor::zeros(shape, DType::U32, &candle_core::Device::Cpu)?;
            let none = Pass::train(none.clone(), none);
            let some = Chain::default().micro_batches(1, 1)?.remove(0);
            let want = rank.pipeline.evaluate(&rank.part, [Ok(some.clone())])?;
            let got = (rank.pipeline).evaluate(&rank.part, [Ok(some), Ok(none.clone())])?;
            assert_eq!(got.mean(), want.mean(), "{shape:?}");
            let trained =
                (rank.pipeline).forward_backward(&rank.part, &[none], &mut rank.gradients);
            Ok(message(trained))
        });
        for said in results {
            assert_says(&said, &["micro-batch 0", "no values", "hint"]);
        }
    }
}

#[test]
fn ids_of_another_type_are_said_to_be_the_inputs_or_the_targets() {
    for (inputs, targets) in [(DType::I64, DType::U32), (DType::U32, DType::I64)] {
        let results = on_mesh((1, 1, 1), |mesh| {
            let mut rank = Rank::chain(&mesh, ZeroStage::One, DType::F32)?;
            let ids = Tensor::zeros((2, 3), DType::U32, &candle_core::Device::Cpu)?;
            let pass = Pass::train(ids.to_dtype(inputs)?, ids.to_dtype(targets)?);
            let pipeline = &rank.pipeline;
            Ok(pipeline.forward_backward(&rank.part, &[pass], &mut rank.gradients))
        });
        for result in results {
            let inputs = format!("inputs of the micro-batch are {inputs:?}");
            let targets = format!("its targets {targets:?}");
            assert_says(&message(result), &[&inputs, &targets, "U32", "hint"]);
        }
    }
}

/// A head whose losses count as this.
struct Counting(Tensor, f64);

impl PlainHead for Counting {
    fn loss(&self, xs: &Tensor, _pass: &Pass) -> Result<Loss> {
        Ok(Loss::new(
            xs.broadcast_mul(&self.0)?.sqr()?.sum_all()?,
            self.1,
        ))
    }
}

#[test]
fn losses_that_count_as_no_number_are_said_to_be_that() {
    for count in [f64::NAN, f64::INFINITY, -1.0, 0.5] {
        let results = on_mesh((1, 1, 1), |mesh| {
            let part = build(&mesh, &ParamStore::init(5), |index, vb| match index {
                4 => {
                    let scale = vb.get(HIDDEN, "scale", Init::Const(1.0))?;
                    Ok(Some(plain_head(Counting(scale, count))))
                }
                _ => Ok(None),
            })?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let batches = Chain::default().micro_batches(1, 2)?;
            let sums = pipeline.evaluate(&part, batches.into_iter().map(Ok));
            Ok((train(&mesh, &part, 1), sums))
        });
        for (trained, sums) in results {
            if count == 0.5 {
                let (trained, sums) = (trained.unwrap(), sums.unwrap());
                assert_eq!((trained.len(), sums.num_targets), (1, 1.0));
                assert_eq!(sums.mean(), sums.loss());
                continue;
            }
            for said in [message(trained), message(sums)] {
                assert_says(&said, &["count is", "finite number >= 0"]);
            }
        }
    }
}
