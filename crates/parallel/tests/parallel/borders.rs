//! What passes between blocks if it is not one tensor (b, t, hidden).

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_parallel::{
    ModelPart, ParamStore, Pass, ZeroStage, column_parallel_linear, head_block, layer_block, pack,
    row_parallel_linear, unpack, vocab_parallel_embedding, vocab_parallel_head,
};

use crate::chain::HIDDEN;
use crate::check::{assert_close, assert_says, message, on_mesh, single_mesh};
use crate::device::device;
use crate::plain_blocks::{VOCAB, trained, with};

/// Outputs of the blocks of [`with_skip`]: the embedding (b, t, hidden); beside it every second position, scaled; the sum of both.
fn borders(block: usize, pass: &Pass) -> Result<Vec<(Shape, DType)>> {
    let (b, t) = pass.dims()?;
    let stream = (Shape::from((b, t, HIDDEN)), DType::F32);
    let merged = (Shape::from((b, t.div_ceil(2), HIDDEN)), DType::F32);
    Ok(match block {
        1 | 2 => vec![stream, merged],
        _ => vec![stream],
    })
}

/// A skip connection over a block that computes on half of the positions.
fn with_skip(mesh: &Mesh, store: &ParamStore) -> Result<ModelPart> {
    let vb = store.builder(DType::F32, &device());
    let both = |xs: &Tensor, pass: &Pass| {
        let shapes = borders(1, pass)?.into_iter().map(|(shape, _)| shape);
        unpack(xs, &shapes.collect::<Vec<_>>())
    };
    let part = ModelPart::build(mesh, &vb, 5, HIDDEN, |index, vb| {
        let scale = |name: &str| vb.get(HIDDEN, name, Init::Uniform { lo: 0.5, up: 1.5 });
        Ok(match index {
            0 => layer_block(vocab_parallel_embedding(
                VOCAB,
                HIDDEN,
                &mesh.tp,
                vb.pp("embed"),
            )?),
            1 => {
                let scale = scale("merging")?;
                with(move |xs, pass| {
                    let every_second: Vec<u32> = (0..pass.dims()?.1 as u32).step_by(2).collect();
                    let every_second = Tensor::new(every_second, xs.device())?;
                    let merged = xs.index_select(&every_second, 1)?.broadcast_mul(&scale)?;
                    pack(&[xs, &merged])
                })
            }
            2 => {
                let scale = scale("inner")?;
                with(move |xs, pass| {
                    let both = both(xs, pass)?;
                    pack(&[&both[0], &both[1].broadcast_mul(&scale)?.tanh()?])
                })
            }
            3 => {
                let scale = scale("skipping")?;
                with(move |xs, pass| {
                    let both = both(xs, pass)?;
                    let positions: Vec<u32> = (0..pass.dims()?.1 as u32).map(|at| at / 2).collect();
                    let positions = Tensor::new(positions, xs.device())?;
                    let wide = both[1].index_select(&positions, 1)?;
                    (&both[0] + wide)?.broadcast_mul(&scale)
                })
            }
            _ => head_block(vocab_parallel_head(VOCAB, HIDDEN, &mesh.tp, vb.pp("head"))?),
        })
    })?;
    Ok(part.with_borders(borders))
}

#[test]
fn several_tensors_pass_between_blocks_on_every_layout() {
    let run = |layout, zero: ZeroStage| {
        let all = on_mesh(layout, |mesh| {
            let store = ParamStore::init(5).with_data_parallel(zero);
            trained(&mesh, &with_skip(&mesh, &store)?)
        });
        all.into_iter().next().unwrap().0
    };
    let one = run((1, 1, 1), ZeroStage::Zero);
    for (layout, zero) in [
        ((2, 1, 1), ZeroStage::Zero),
        ((3, 1, 1), ZeroStage::One),
        ((3, 2, 1), ZeroStage::Three),
        ((3, 1, 2), ZeroStage::Zero),
        ((1, 1, 2), ZeroStage::Zero),
        ((1, 4, 1), ZeroStage::Three),
    ] {
        for (name, values) in run(layout, zero) {
            let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
            let what = format!("{layout:?} {zero:?} {name}");
            assert_close(&what, &tensor(&values), &tensor(&one[&name]));
        }
    }
}

#[test]
fn a_block_that_gives_something_else_is_named_on_one_rank_too() {
    type Borders = fn(usize, &Pass) -> Result<Vec<(Shape, DType)>>;
    let wrong: [(&str, Borders); 3] = [
        (
            "block 0 gives F32 of shape [1, 4, 6] to the next; expected F32 of shape [1, 4, 7]",
            |_, pass| {
                let (b, t) = pass.dims()?;
                Ok(vec![((b, t, HIDDEN + 1).into(), DType::F32)])
            },
        ),
        ("expected one type", |_, pass| {
            Ok(vec![
                (pass.inputs().shape().clone(), DType::F32),
                (1.into(), DType::F64),
            ])
        }),
        ("a block gives no tensor", |_, _| Ok(Vec::new())),
    ];
    let mesh = single_mesh();
    for (expected, borders) in wrong {
        let part = with_skip(&mesh, &ParamStore::init(5))
            .unwrap()
            .with_borders(borders);
        assert_says(&message(trained(&mesh, &part)), &[expected]);
    }
    let xs = Tensor::zeros(5, DType::F32, &device()).unwrap();
    let said = message(unpack(&xs, &[Shape::from((2, 3))]));
    assert_says(&said, &["5 values", "[2, 3]", "have 6"]);
}

/// A border at which each tensor-parallel rank has values of its own, declared as such, is no disagreement of ranks.
#[test]
fn tensor_parallel_ranks_need_not_share_what_passes_between_blocks() {
    const WIDE: usize = 10;
    let run = |layout| {
        let all = on_mesh(layout, |mesh| {
            let vb = ParamStore::init(5).builder(DType::F32, &device());
            let tp = &mesh.tp;
            let part = ModelPart::build(&mesh, &vb, 4, HIDDEN, |index, vb| {
                Ok(match index {
                    0 => layer_block(vocab_parallel_embedding(VOCAB, HIDDEN, tp, vb.pp("embed"))?),
                    1 => layer_block(column_parallel_linear(HIDDEN, WIDE, true, tp, vb.pp("up"))?),
                    2 => layer_block(row_parallel_linear(WIDE, HIDDEN, true, tp, vb.pp("down"))?),
                    _ => head_block(vocab_parallel_head(VOCAB, HIDDEN, tp, vb.pp("head"))?),
                })
            })?;
            let num_ranks = tp.world_size();
            let part = part.with_borders(move |block, pass| {
                let (b, t) = pass.dims()?;
                let width = if block == 1 { WIDE / num_ranks } else { HIDDEN };
                Ok(vec![((b, t, width).into(), DType::F32)])
            });
            trained(&mesh, &part)
        });
        all.into_iter().next().unwrap().0
    };
    let one = run((1, 1, 1));
    for layout in [(1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 2)] {
        for (name, values) in run(layout) {
            let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
            assert_close(
                &format!("{layout:?} {name}"),
                &tensor(&values),
                &tensor(&one[&name]),
            );
        }
    }
}
