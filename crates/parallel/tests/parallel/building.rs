//! Mistakes in what a model asks for while it is built, and ranks that build different models, are a sentence.

use candle_comm::ProcessGroup;
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_parallel::checkpoint::{HfSave, save_hf};
use candle_parallel::{
    ColumnParallelLinear, Gradient, Layer, ParamBuilder, ParamStore, Pass, Placement, PlainBlock,
    RowParallelLinear, Shard, ZeroStage, column_parallel_linear, plain_block, row_parallel_linear,
};

use crate::chain::{Chain, HIDDEN};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, single_mesh};
use crate::device::device;
use crate::mistaken::{build, train};

#[test]
fn ranks_build_the_same_model() {
    let layouts = [(1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 2)];
    for layout in layouts {
        let of_seeds = on_mesh(layout, |mesh| {
            let store = ParamStore::init(mesh.world.rank() as u64);
            Ok(Chain::default().part(&mesh, &store).map(drop))
        });
        for result in of_seeds {
            assert_says(
                &message(result),
                &["different models", "seed 0 on rank 0", "hint"],
            );
        }
        let of_blocks = on_mesh(layout, |mesh| {
            let num_layers = if mesh.world.rank() == 1 { 5 } else { 3 };
            let chain = Chain {
                num_layers,
                ..Chain::default()
            };
            Ok(chain.part(&mesh, &ParamStore::init(5)).map(drop))
        });
        for result in of_blocks {
            let words = ["the number of blocks is 5 on rank 0", "7 on rank 1"];
            assert_says(&message(result), &words);
        }
        let of_types = on_mesh(layout, |mesh| {
            let dtype = [DType::F32, DType::BF16][usize::from(mesh.world.rank() == 1)];
            let chain = Chain {
                dtype,
                ..Chain::default()
            };
            Ok(chain.part(&mesh, &ParamStore::init(5)).map(drop))
        });
        for result in of_types {
            assert_says(&message(result), &["the type is f32 on rank 0 and bf16"]);
        }
    }
}

#[test]
fn ranks_read_the_same_checkpoint() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = |seed: u64| folder.path().join(seed.to_string());
    for seed in [1, 2] {
        let mesh = single_mesh();
        let part = Chain::default().part(&mesh, &ParamStore::init(seed))?;
        let save = HfSave::new(path(seed), Vec::new());
        save_hf(part.params(), &mesh, &save)?;
    }
    let results = on_mesh((1, 2, 1), |mesh| {
        let store = ParamStore::from_pretrained(path(1 + mesh.world.rank() as u64))?;
        Ok(Chain::default().part(&mesh, &store).map(drop))
    });
    for result in results {
        assert_says(&message(result), &["source of the weights", "digest"]);
    }
    Ok(())
}

#[test]
fn a_shared_weight_has_one_distribution() {
    for layout in [(1, 1, 1), (2, 1, 1), (2, 2, 2)] {
        let results = on_mesh(layout, |mesh| {
            let built = build(&mesh, &ParamStore::init(5), |index, vb| {
                if index == 1 || index == 3 {
                    let init = Init::Const(index as f64);
                    vb.tied().get(HIDDEN, "shared", init)?;
                }
                Ok(None)
            });
            Ok(built.map(drop))
        });
        for result in results {
            let words = ["parameter shared", "Const(1.0)", "Const(3.0)", "hint"];
            assert_says(&message(result), &words);
        }
    }
}

/// How rank 1 asks for the parameter of block 2 in another way.
#[derive(Clone, Copy, Debug)]
enum Other {
    Shape,
    Type,
    Name,
    More,
    Init,
    Placement,
}

#[test]
fn ranks_that_ask_for_a_parameter_in_another_way_are_named_with_it() {
    let cases: [(Other, &[&str]); 6] = [
        (
            Other::Shape,
            &["parameter scale", "[6]", "on rank 0", "[7]", "on rank 1"],
        ),
        (
            Other::Type,
            &[
                "parameter scale",
                "in f32",
                "on rank 0",
                "in bf16",
                "on rank 1",
            ],
        ),
        (Other::Name, &["parameter scale", "missing on rank 1"]),
        (
            Other::More,
            &["parameter more", "on rank 1", "missing on rank 0"],
        ),
        (
            Other::Init,
            &[
                "parameter scale",
                "Const(1.0)",
                "on rank 0",
                "Const(2.0)",
                "on rank 1",
            ],
        ),
        (
            Other::Placement,
            &[
                "parameter scale",
                "Complete",
                "on rank 0",
                "Partial",
                "on rank 1",
            ],
        ),
    ];
    for layout in [(1, 2, 1), (1, 1, 2), (2, 1, 2)] {
        for (other, words) in cases {
            let results = on_mesh(layout, |mesh| {
                let is_other = mesh.world.rank() == 1;
                let built = build(&mesh, &ParamStore::init(5), |index, vb| {
                    if index == 1 {
                        ask(&vb, other, is_other)?;
                    }
                    Ok(None)
                });
                Ok(built.map(drop))
            });
            for result in results {
                let said = message(result);
                assert_says(&said, words);
                assert_says(&said, &["ranks build different models", "hint"]);
            }
        }
    }
}

/// Asks for a parameter, `other`wise on one of the ranks.
fn ask(vb: &ParamBuilder, other: Other, is_other: bool) -> Result<()> {
    let (one, complete) = (Init::Const(1.0), Placement::Replicated(Gradient::Complete));
    let get =
        |len: usize, name, placement, init| vb.get_placed(len, name, placement, init).map(drop);
    match (other, is_other) {
        (_, false) => get(HIDDEN, "scale", complete, one),
        (Other::Shape, _) => get(HIDDEN + 1, "scale", complete, one),
        (Other::Type, _) => {
            let builder = vb.var_builder();
            let asked = builder.get_with_hints_dtype(HIDDEN, "scale", one, DType::BF16);
            asked.map(drop)
        }
        (Other::Name, _) => get(HIDDEN, "size", complete, one),
        (Other::More, _) => {
            get(HIDDEN, "scale", complete.clone(), one)?;
            get(HIDDEN, "more", complete, one)
        }
        (Other::Init, _) => get(HIDDEN, "scale", complete, Init::Const(2.0)),
        (Other::Placement, _) => get(
            HIDDEN,
            "scale",
            Placement::Replicated(Gradient::Partial),
            one,
        ),
    }
}

#[test]
fn parts_of_another_group_and_parts_that_leave_something_out_are_refused() {
    // Of another group, with a gap, and a part of its own that a rank does not tell the others of.
    let cases: [&[&str]; 3] = [
        &[
            "parameter scale is divided over a group of 3 ranks",
            "group has 2",
        ],
        &[
            "parameter scale",
            "do not cover 0..6: [[0..3], [4..6]]",
            "Shard::of_ranks",
        ],
        &[
            "parameter scale",
            "do not cover 0..6: [[0..3]]",
            "Shard::of_ranks",
        ],
    ];
    for (case, words) in cases.into_iter().enumerate() {
        let results = on_mesh((1, 1, 2), |mesh| {
            let built = build(&mesh, &ParamStore::init(5), |index, vb| {
                if index == 1 {
                    let three = ProcessGroup::unconnected(mesh.tp.rank(), 3, device());
                    let shard = match case {
                        0 => Shard::even(0, HIDDEN, &three)?,
                        1 => Shard::of_ranks(0, HIDDEN, &mesh.tp, |rank| 4 * rank..3 + 3 * rank),
                        _ => Shard::new(0, 3 * mesh.tp.rank()..3 + 3 * mesh.tp.rank(), HIDDEN),
                    };
                    vb.get_placed(HIDDEN, "scale", shard, Init::Const(1.0))?;
                }
                Ok(None)
            });
            Ok(built.map(drop))
        });
        for result in results {
            assert_says(&message(result), words);
        }
    }
}

#[test]
fn a_name_that_two_blocks_ask_for_is_shared_only_if_they_say_so() {
    for layout in [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2)] {
        let results = on_mesh(layout, |mesh| {
            let built = build(&mesh, &ParamStore::init(5), |index, vb| {
                if index == 1 || index == 3 {
                    vb.get(HIDDEN, "scale", Init::Const(1.0))?;
                }
                Ok(None)
            });
            Ok(built.map(drop))
        });
        for result in results {
            let words = [
                "block 1 and block 3 ask for parameter scale",
                "pp(..)",
                "tied()",
            ];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn a_block_that_asks_with_the_builder_of_no_block_does_not_share_by_mistake() {
    let results = on_mesh((1, 1, 1), |mesh| {
        let store = ParamStore::init(5);
        let outer = store.builder(DType::F32, &device());
        let built = build(&mesh, &store, |index, _| {
            if index == 1 || index == 3 {
                outer.get(HIDDEN, "scale", Init::Const(1.0))?;
            }
            Ok(None)
        });
        Ok(built.map(drop))
    });
    for result in results {
        assert_says(&message(result), &["outside of blocks", "twice", "scale"]);
    }
}

#[test]
fn a_builder_of_candle_s_gives_the_type_that_is_asked_for() -> Result<()> {
    let vb = ParamStore::init(5).builder(DType::BF16, &device());
    let candle = vb.var_builder();
    let of = |name: &str, dtype| candle.get_with_hints_dtype(4, name, Init::Const(1.0), dtype);
    assert_eq!(of("wide", DType::F32)?.dtype(), DType::F32);
    assert_eq!(candle.get(4, "narrow")?.dtype(), DType::BF16);
    assert_eq!(
        candle.to_dtype(DType::F16).get(4, "half")?.dtype(),
        DType::F16
    );
    assert_says(
        &message(of("ids", DType::U32)),
        &["parameter ids", "u32", "expected f32"],
    );
    assert_says(
        &message(of("wide", DType::BF16)),
        &["parameter wide", "f32", "bf16"],
    );
    Ok(())
}

#[test]
fn parameters_of_two_types_are_trained_together() {
    let trained = |layout, zero: ZeroStage| {
        let results = on_mesh(layout, |mesh| {
            let store = ParamStore::init(5).with_data_parallel(zero);
            let part = build(&mesh, &store, |index, vb| {
                if index != 2 {
                    return Ok(None);
                }
                let up = column_parallel_linear(HIDDEN, 8, true, &mesh.tp, vb.pp("up"))?;
                let down = row_parallel_linear(8, HIDDEN, true, &mesh.tp, vb.pp("down"))?;
                let builder = vb.var_builder();
                let scale = Init::Const(1.0);
                let scale = builder.get_with_hints_dtype(HIDDEN, "s", scale, DType::BF16)?;
                Ok(Some(plain_block(Mixed { scale, up, down })))
            })?;
            train(&mesh, &part, 3)
        });
        results.into_iter().next().unwrap()
    };
    let want = trained((1, 1, 1), ZeroStage::Zero);
    for layout in [(1, 2, 1), (2, 2, 2)] {
        for zero in ZERO_STAGES {
            let got = trained(layout, zero);
            for ((loss, _), (want, _)) in got.iter().zip(&want) {
                assert!((loss - want).abs() <= 1e-3 * want, "{got:?}");
            }
        }
    }
}

struct Mixed {
    scale: Tensor,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl PlainBlock for Mixed {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let scaled = xs.broadcast_mul(&self.scale.to_dtype(DType::F32)?)?;
        xs + self.down.apply(&self.up.apply(&scaled, pass)?, pass)?
    }
}

#[test]
fn running_statistics_are_refused_by_name() {
    let vb = ParamStore::init(5)
        .builder(DType::F32, &device())
        .pp("norm");
    let norm = candle_nn::batch_norm(HIDDEN, 1e-5, vb.var_builder());
    let words = ["norm.running_mean", "batch normalization", "hint"];
    assert_says(&message(norm.map(drop)), &words);
}
