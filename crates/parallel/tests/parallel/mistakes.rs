//! Mistakes in a model of one's own are right or a sentence, on every layout.

use std::cell::RefCell;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::Init;
use candle_parallel::{
    Block, ColumnParallelLinear, Gradient, Layer, Loss, ParamBuilder, ParamStore, Pass, Placement,
    PlainBlock, PlainHead, RowParallelLinear, Shard, WEIGHT_INIT, ZeroStage,
    column_parallel_linear, plain_block, plain_head, regions, row_parallel_linear,
};

use crate::chain::HIDDEN;
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, random};
use crate::mistaken::{Numbers, build, same, train, with_block};

/// An embedding and a head that share one weight, which every rank holds whole.
struct Table(Tensor);
struct Logits(Tensor);

impl PlainBlock for Table {
    fn forward(&self, tokens: &Tensor, _pass: &Pass) -> Result<Tensor> {
        let (b, t) = tokens.dims2()?;
        let ids = tokens.flatten_all()?.to_device(self.0.device())?;
        self.0.index_select(&ids, 0)?.reshape((b, t, HIDDEN))
    }
}

impl PlainHead for Logits {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let logits = xs.flatten_to(1)?.matmul(&self.0.t()?)?;
        let targets = pass.targets()?.flatten_all()?;
        let logs = candle_nn::ops::log_softmax(&logits, 1)?;
        let targets = targets.to_device(logits.device())?.unsqueeze(1)?;
        let sum = logs.gather(&targets, 1)?.sum_all()?.neg()?;
        Ok(Loss::new(sum, pass.num_targets()? as f64))
    }
}

/// How the head of [`tied`] gets the weight of the embedding.
#[derive(Clone, Copy, PartialEq)]
enum Tie {
    ByName,
    /// The embedding's tensor, where that is on this rank.
    Cloned,
    /// Asked for before the blocks are built, and used by both.
    Outside,
}

/// Trains a chain whose embedding and head share a weight.
fn tied(layout: (usize, usize, usize), zero: ZeroStage, tie: Tie) -> Vec<Result<Numbers>> {
    on_mesh(layout, |mesh| {
        let shape = (13, HIDDEN);
        let kept: RefCell<Option<Tensor>> = RefCell::new(None);
        let store = ParamStore::init(5).with_data_parallel(zero);
        let outside = store.builder(DType::F32, mesh.world.device());
        if tie == Tie::Outside {
            kept.replace(Some(outside.get(shape, "wte", WEIGHT_INIT)?));
        }
        let weight = |vb: &ParamBuilder| -> Result<Tensor> {
            if let Some(weight) = kept.borrow().clone().filter(|_| tie != Tie::ByName) {
                return Ok(weight);
            }
            let weight = vb.tied().get(shape, "wte", WEIGHT_INIT)?;
            kept.replace(Some(weight.clone()));
            Ok(weight)
        };
        let stage = build(&mesh, &store, |index, vb| match index {
            0 => Ok(Some(plain_block(Table(weight(&vb)?)))),
            4 => Ok(Some(plain_head(Logits(weight(&vb)?)))),
            _ => Ok(None),
        })?;
        Ok(train(&mesh, &stage, 3))
    })
}

#[test]
fn a_weight_that_a_block_has_from_another_one_gets_its_whole_gradient() {
    let want = tied((1, 1, 1), ZeroStage::Zero, Tie::ByName)
        .remove(0)
        .unwrap();
    for layout in [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2)] {
        for zero in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two] {
            for tie in [Tie::ByName, Tie::Cloned, Tie::Outside] {
                for numbers in tied(layout, zero, tie) {
                    same(&numbers.unwrap(), &want);
                }
            }
        }
    }
}

#[test]
fn a_weight_that_zero_3_has_released_is_named_with_the_block_that_uses_it() {
    for numbers in tied((1, 2, 1), ZeroStage::Three, Tie::ByName) {
        numbers.unwrap();
    }
    for numbers in tied((1, 2, 1), ZeroStage::Three, Tie::Cloned) {
        let words = ["block 4 uses", "parameter wte", "ZeRO-3", "hint", "tied()"];
        assert_says(&message(numbers), &words);
    }
}

/// x + scale(x), and what else a test wants of it.
struct With<F>(F);

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync> PlainBlock for With<F> {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        self.0(xs)
    }
}

fn with(forward: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Block {
    plain_block(With(forward))
}

const INIT: Init = Init::Uniform { lo: 0.5, up: 1.5 };

#[test]
fn a_variable_that_is_no_parameter_is_an_error_with_its_shape() {
    for freezes in [false, true] {
        let results = on_mesh((1, 2, 1), |mesh| {
            let store = ParamStore::init(5).with_data_parallel(ZeroStage::Two);
            let store = match freezes {
                false => store,
                true => store.freeze(|name| !name.starts_with("head")),
            };
            let stage = build(&mesh, &store, |index, vb| {
                if index != 2 {
                    return Ok(None);
                }
                let own = Var::from_tensor(&random(1, HIDDEN)?)?;
                let scale = vb.get(HIDDEN, "scale", INIT)?;
                Ok(Some(with(move |xs| {
                    xs.broadcast_mul(&scale)?.broadcast_add(own.as_tensor())
                })))
            })?;
            Ok(train(&mesh, &stage, 1))
        });
        for result in results {
            assert_says(
                &message(result),
                &["block 2", "shape [6]", "no parameter", "hint"],
            );
        }
    }
}

/// A tensor-parallel layer with a scale of its hidden features.
struct Scaled {
    up: ColumnParallelLinear,
    scale: Tensor,
    down: RowParallelLinear,
}

impl PlainBlock for Scaled {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let ys = self.up.apply(xs, pass)?.tanh()?;
        xs + self.down.apply(&ys.broadcast_mul(&self.scale)?, pass)?
    }
}

#[test]
fn copies_that_begin_to_drift_after_the_first_step_are_named_then() {
    // With a weight of zeros behind it the scale has no gradient in the first step.
    for (layout, zero) in [((1, 1, 2), ZeroStage::One), ((1, 2, 2), ZeroStage::Three)] {
        let results = on_mesh(layout, |mesh| {
            let stage = with_block(&mesh, zero, |vb| {
                let shard = Shard::even(0, 8, &mesh.tp)?;
                let zeros = Init::Const(0.0);
                let down = (HIDDEN, 8);
                Ok(plain_block(Scaled {
                    up: column_parallel_linear(HIDDEN, 8, false, &mesh.tp, vb.pp("up"))?,
                    scale: vb.get(shard.len(), "scale", INIT)?,
                    down: RowParallelLinear::new(
                        vb.get_placed(down, "down", shard.along(1), zeros)?,
                        None,
                        mesh.tp.clone(),
                    ),
                }))
            })?;
            Ok(train(&mesh, &stage, 3))
        });
        for result in results {
            let words = [
                "gradient of parameter scale differs",
                "in this step",
                "Gradient::Partial",
            ];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn random_numbers_that_differ_between_tensor_parallel_ranks_are_found_where_they_are_drawn() {
    let results = on_mesh((1, 1, 2), |mesh| {
        let rank = mesh.tp.rank() as f64;
        let stage = with_block(&mesh, ZeroStage::One, |vb| {
            let scale = vb.get(HIDDEN, "scale", INIT)?;
            Ok(with(move |xs| xs.broadcast_mul(&scale)? * (1.0 + rank)))
        })?;
        Ok(train(&mesh, &stage, 1))
    });
    for result in results {
        let words = ["the output of block 2 differs", "ranks 0 and 1", "dropout"];
        assert_says(&message(result), &words);
    }
}

/// A column-parallel and a row-parallel weight, this one drawn from `init`, without a region around them.
fn without_region(mesh: &Mesh, vb: &ParamBuilder, init: Init) -> Result<Block> {
    let shard = Shard::even(0, 8, &mesh.tp)?;
    let up = vb.get_placed((8, HIDDEN), "up", shard.clone(), WEIGHT_INIT)?;
    let down = vb.get_placed((HIDDEN, 8), "down", shard.along(1), init)?;
    let tp = mesh.tp.clone();
    Ok(with(move |xs| {
        let (b, t, _) = xs.dims3()?;
        let ys = xs.flatten_to(1)?.matmul(&up.t()?)?.tanh()?;
        let ys = ys.matmul(&down.t()?)?.reshape((b, t, HIDDEN))?;
        xs + regions::reduce_from_tensor_parallel_region(&ys, &tp)?
    }))
}

#[test]
fn a_region_that_is_missing_is_found_where_it_is() {
    // With zeros behind it, only after the first update.
    for (init, num_steps) in [(WEIGHT_INIT, 1), (Init::Const(0.0), 2)] {
        let results = on_mesh((1, 1, 2), |mesh| {
            let block = |vb| without_region(&mesh, &vb, init);
            let stage = with_block(&mesh, ZeroStage::One, block)?;
            Ok(train(&mesh, &stage, num_steps))
        });
        for result in results {
            let words = [
                "gradient of block 2's input differs",
                "copy_to_tensor_parallel_region",
            ];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn a_complete_gradient_that_is_said_to_be_a_summand_is_refused() {
    for (layout, zero) in [((1, 1, 2), ZeroStage::Zero), ((1, 2, 3), ZeroStage::Two)] {
        let results = on_mesh(layout, |mesh| {
            let stage = with_block(&mesh, zero, |vb| {
                let placement = Placement::Replicated(Gradient::Partial);
                let scale = vb.get_placed(HIDDEN, "scale", placement, INIT)?;
                Ok(with(move |xs| xs.broadcast_mul(&scale)))
            })?;
            Ok(train(&mesh, &stage, 1))
        });
        for result in results {
            let words = [
                "parameter scale is the same on all",
                "tensor-parallel ranks",
                "hint",
            ];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn a_parallel_layer_with_another_group_than_the_mesh_s_is_refused() {
    let results = on_mesh((1, 1, 2), |mesh| {
        let stage = with_block(&mesh, ZeroStage::One, |vb| {
            let alone = ProcessGroup::single(mesh.world.device().clone());
            let up = column_parallel_linear(HIDDEN, 8, true, &alone, vb.pp("up"))?;
            let down = row_parallel_linear(8, HIDDEN, true, &alone, vb.pp("down"))?;
            Ok(with(move |xs| {
                let pass = Pass::infer(xs.detach());
                xs + down.apply(&up.apply(xs, &pass)?, &pass)?
            }))
        })?;
        Ok(train(&mesh, &stage, 1))
    });
    for result in results {
        assert_says(
            &message(result),
            &["is the same on all 2", "ProcessGroup::single"],
        );
    }
}

#[test]
fn tensor_parallel_ranks_that_skip_regions_never_add_what_does_not_belong_together() {
    // Rank 0 has no rows for the expert of block 2, rank 1 none for that of block 3.
    let results = on_mesh((1, 1, 2), |mesh| {
        let store = ParamStore::init(5);
        let stage = build(&mesh, &store, |index, vb| {
            if index != 2 && index != 3 {
                return Ok(None);
            }
            let is_idle = mesh.tp.rank() == index - 2;
            let scale = vb.pp(index).get(HIDDEN, "scale", INIT)?;
            let tp = mesh.tp.clone();
            Ok(Some(with(move |xs| {
                let xs = xs.broadcast_mul(&scale)?;
                let expert = match is_idle {
                    true => (&xs * 0.5)?.detach(),
                    false => regions::copy_to_tensor_parallel_region(&xs, &tp)?,
                };
                xs + regions::reduce_from_tensor_parallel_region(&expert, &tp)?
            })))
        })?;
        Ok(train(&mesh, &stage, 1))
    });
    for result in results {
        let said = message(result);
        assert_says(&said, &["backward pass", "block 2", "block 3"]);
    }
}

#[test]
fn what_is_computed_from_parameters_while_a_block_is_built_is_refused() {
    for zero in [ZeroStage::Zero, ZeroStage::Two] {
        let fused = on_mesh((1, 2, 1), |mesh| {
            let stage = with_block(&mesh, zero, |vb| {
                let (a, b) = (vb.get(3, "a", INIT)?, vb.get(3, "b", INIT)?);
                let scale = Tensor::cat(&[a, b], 0)?;
                Ok(with(move |xs| xs.broadcast_mul(&scale)))
            })?;
            train(&mesh, &stage, 1)?;
            Ok(train(&mesh, &stage, 2))
        });
        for result in fused {
            assert_says(
                &message(result),
                &["block 2", "from a, b", "built", "cat", "hint"],
            );
        }
    }
}

#[test]
fn views_of_parameters_may_be_kept() {
    let trained = |zero: ZeroStage, is_kept: bool| {
        let results = on_mesh((1, 2, 1), |mesh| {
            let stage = with_block(&mesh, zero, |vb| {
                let weight = vb.get((HIDDEN, HIDDEN), "weight", WEIGHT_INIT)?;
                let view = weight.t()?.narrow(0, 0, HIDDEN)?;
                Ok(with(move |xs| {
                    let (b, t, _) = xs.dims3()?;
                    let view = match is_kept {
                        true => view.clone(),
                        false => weight.t()?,
                    };
                    let ys = xs.flatten_to(1)?.matmul(&view)?;
                    xs + ys.reshape((b, t, HIDDEN))?
                }))
            })?;
            train(&mesh, &stage, 3)
        });
        results.into_iter().next().unwrap()
    };
    let want = trained(ZeroStage::Zero, false);
    for zero in ZERO_STAGES {
        same(&trained(zero, true), &want);
    }
}

#[test]
fn values_that_zero_3_has_released_are_said_to_be_missing_while_blocks_are_built() {
    let results = on_mesh((1, 2, 1), |mesh| {
        let built = with_block(&mesh, ZeroStage::Three, |vb| {
            let scale = (vb.get(HIDDEN, "scale", INIT)? * 2.0)?;
            Ok(with(move |xs| xs.broadcast_mul(&scale)))
        });
        Ok(built.map(drop))
    });
    for result in results {
        assert_says(
            &message(result),
            &["block 2", "ZeRO-3", "while blocks are built", "hint"],
        );
    }
}
