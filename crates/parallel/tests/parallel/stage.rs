//! The tape: its gradients are those of one candle graph, and what gets none is named.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_parallel::{
    Block, BlockCosts, Gradients, Loss, ModelPart, ParamBuilder, ParamStore, Pass, Pipeline,
    PipelineLayout, PlainBlock, PlainHead, Schedule, plain_block, plain_head, stage_blocks,
};

use crate::chain::{Chain, HIDDEN, Values, gather_gradients};
use crate::check::{UNREDUCED, assert_says, assert_values_close, message, on_mesh, single_mesh};
use crate::device::device;

/// Gradients of the sum of the losses of the micro-batches, and that sum, by one candle graph a micro-batch.
fn one_graph(chain: &Chain, batches: &[Pass]) -> Result<(Values, f64)> {
    let mesh = single_mesh();
    let store = ParamStore::init(5).with_data_parallel(UNREDUCED);
    let part = chain.part(&mesh, &store)?;
    let vb = store.builder(DType::F32, &device());
    let blocks: Vec<_> = (0..chain.num_blocks())
        .map(|index| chain.in_graph(index, &mesh.tp, &vb))
        .collect::<Result<_>>()?;
    let mut sum = Values::new();
    let mut loss = 0.0;
    for batch in batches {
        let mut xs = batch.inputs().clone();
        for block in &blocks {
            xs = block.forward(&xs, batch)?;
        }
        loss += f64::from(xs.to_scalar::<f32>()?);
        let grads = xs.backward()?;
        for param in part.params().iter() {
            let grad = grads.get(&param.tensor()).expect("a gradient");
            let grad = grad.flatten_all()?.to_vec1::<f32>()?;
            let total = sum
                .entry(param.name.clone())
                .or_insert(vec![0.0; grad.len()]);
            total.iter_mut().zip(grad).for_each(|(t, g)| *t += g);
        }
    }
    Ok((sum, loss))
}

#[test]
fn the_tape_gives_the_gradients_of_one_graph() {
    for tied in [false, true] {
        let chain = Chain {
            tied,
            ..Chain::default()
        };
        let batches = chain.micro_batches(3, 4).unwrap();
        let (expected, expected_loss) = one_graph(&chain, &batches).unwrap();
        // Ties across stages are summed later, by the optimizer.
        let layouts: &[_] = match tied {
            true => &[(1, 1, 1), (1, 1, 3)],
            false => &[(1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 3), (3, 1, 2)],
        };
        for &layout in layouts {
            for schedule in [Schedule::GPipe, Schedule::OneForwardOneBackward] {
                let all = on_mesh(layout, |mesh| {
                    let part =
                        chain.part(&mesh, &ParamStore::init(5).with_data_parallel(UNREDUCED))?;
                    let mut gradients = Gradients::new(part.params(), &mesh)?;
                    let pipeline = Pipeline::new(schedule, &mesh);
                    let report = pipeline.forward_backward(&part, &batches, &mut gradients)?;
                    let loss = report.loss_sum;
                    assert_eq!(loss.is_some(), part.is_last());
                    if let Some(loss) = loss {
                        let loss = loss.to_scalar::<f64>()?;
                        assert!((loss - expected_loss).abs() < 1e-6 * expected_loss);
                    }
                    gather_gradients(&part, &mesh, &gradients)
                });
                let names = |values: &Values| values.keys().cloned().collect::<Vec<_>>();
                assert_eq!(names(&all[0]), names(&expected));
                for (name, values) in &expected {
                    let what = format!("{layout:?} {schedule:?} tied {tied}: {name}");
                    assert_values_close(&what, &all[0][name], values);
                }
            }
        }
    }
}

type Forward = Box<dyn Fn(&Tensor, &Pass) -> Result<Tensor> + Send + Sync>;

struct Custom(Forward);

impl PlainBlock for Custom {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        (self.0)(xs, pass)
    }
}

/// Error of a training step of the chain with block 2 replaced by `custom`.
fn error_with(custom: impl Fn(&ParamBuilder) -> Result<Forward>) -> String {
    let (chain, mesh) = (Chain::default(), single_mesh());
    let vb = ParamStore::init(1)
        .with_data_parallel(UNREDUCED)
        .builder(DType::F32, &device());
    let build = |index, vb: ParamBuilder| -> Result<Block> {
        match index {
            2 => Ok(plain_block(Custom(custom(&vb.pp("custom"))?))),
            _ => chain.block(index, &mesh.tp, &vb),
        }
    };
    let part = ModelPart::build(&mesh, &vb, chain.num_blocks(), HIDDEN, build).unwrap();
    let mut gradients = Gradients::new(part.params(), &mesh).unwrap();
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    let batches = chain.micro_batches(1, 1).unwrap();
    message(pipeline.forward_backward(&part, &batches, &mut gradients))
}

fn ones(vb: &ParamBuilder, name: &str) -> Result<Tensor> {
    vb.get(HIDDEN, name, Init::Const(1.0))
}

#[test]
fn an_operation_without_backward_is_reported_with_the_parameter() {
    let said = error_with(|vb| {
        let weight = ones(vb, "weight")?;
        Ok(Box::new(move |xs, _| {
            xs + candle_nn::ops::rms_norm(xs, &weight, 1e-6)?
        }))
    });
    assert_says(
        &said,
        &["backward pass of block 2", "custom.weight", "hint"],
    );
}

#[test]
fn an_operation_that_cuts_everything_is_reported_with_the_block() {
    let said = error_with(|vb| {
        let frozen = ones(vb, "weight")?.detach();
        let used = ones(vb, "bias")?;
        Ok(Box::new(move |xs, _| {
            candle_nn::ops::rms_norm(xs, &frozen, 1e-6)?.broadcast_add(&used)
        }))
    });
    // Both the detached weight and the input get none: the parameter is named first.
    assert_says(&said, &["block 2", "custom.weight"]);
    let said = error_with(|vb| {
        let bias = ones(vb, "bias")?;
        Ok(Box::new(move |xs, _| {
            candle_nn::ops::softmax_last_dim(xs)?.broadcast_add(&bias)
        }))
    });
    assert_says(&said, &["block 2", "input got no gradient", "hint"]);
}

#[test]
fn an_unused_parameter_is_named() {
    let said = error_with(|vb| {
        let (used, _) = (ones(vb, "used")?, (ones(vb, "a")?, ones(vb, "b")?));
        Ok(Box::new(move |xs, _| xs.broadcast_mul(&used)))
    });
    assert_says(&said, &["2 trainable parameters", "the first is custom.a"]);
}

#[test]
fn errors_of_a_block_name_it() {
    let said = error_with(|_| Ok(Box::new(|xs, _| xs.narrow(0, 5, 5))));
    assert_says(&said, &["forward pass of block 2"]);
    let said = error_with(|_| Ok(Box::new(|xs, _| xs.narrow(1, 0, 1))));
    assert_says(&said, &["block"]);
}

struct NoScalar;

impl PlainHead for NoScalar {
    fn loss(&self, xs: &Tensor, _pass: &Pass) -> Result<Loss> {
        Ok(Loss::new(xs.clone(), 6.0))
    }
}

#[test]
fn a_last_block_that_gives_no_scalar_is_an_error() {
    let mesh = single_mesh();
    let vb = ParamStore::init(1)
        .with_data_parallel(UNREDUCED)
        .builder(DType::F32, &device());
    let build = |index, _| -> Result<Block> {
        Ok(match index {
            0 => plain_block(Custom(Box::new(|xs, _| xs.to_dtype(DType::F32)))),
            _ => plain_head(NoScalar),
        })
    };
    let part = ModelPart::build(&mesh, &vb, 2, HIDDEN, build).unwrap();
    let mut gradients = Gradients::new(part.params(), &mesh).unwrap();
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    let batches = Chain::default().micro_batches(1, 1).unwrap();
    let said = message(pipeline.forward_backward(&part, &batches, &mut gradients));
    assert_says(&said, &["[2, 3]", "expected a scalar"]);
}

#[test]
fn blocks_are_divided_and_too_many_stages_are_an_error() {
    for num_blocks in 3..=12 {
        for num_stages in 1..=num_blocks - 2 {
            let ranges: Vec<Range<usize>> = (0..num_stages)
                .map(|part| stage_blocks(num_blocks, part, num_stages).unwrap())
                .collect();
            let covered: Vec<usize> = ranges.iter().cloned().flatten().collect();
            assert_eq!(covered, (0..num_blocks).collect::<Vec<_>>());
            let layers = |range: &Range<usize>| range.end.min(num_blocks - 1) - range.start.max(1);
            let counts = ranges.iter().map(layers);
            let (least, most) = (counts.clone().min().unwrap(), counts.max().unwrap());
            assert!(least >= 1 && most - least <= 1, "{ranges:?}");
        }
    }
    let said = message(stage_blocks(5, 0, 4));
    assert_says(&said, &["pp(4)", "layers(3)", "pp <= 3"]);
}

/// All ways to give `num_layers` to stages, one or more to each.
fn ways(num_layers: usize, num_stages: usize) -> Vec<Vec<usize>> {
    if num_stages == 1 {
        return vec![vec![num_layers]];
    }
    let firsts = 1..=num_layers + 1 - num_stages;
    let all = firsts.flat_map(|first| {
        let rest = ways(num_layers - first, num_stages - 1).into_iter();
        rest.map(move |rest| [vec![first], rest].concat())
    });
    all.collect()
}

#[test]
fn no_other_layout_has_a_rank_with_less_to_do_than_the_balanced_one() {
    for (p, v, schedule) in [
        (2, 1, Schedule::OneForwardOneBackward),
        (4, 1, Schedule::OneForwardOneBackward),
        (2, 2, Schedule::ZeroBubbleH1),
        (2, 2, Schedule::ZeroBubbleV),
        (3, 2, Schedule::ZeroBubbleV),
    ] {
        let ranks = schedule.placement(p, v).unwrap();
        for num_layers in p * v..p * v + 7 {
            for (first, last) in [(0.0, 0.0), (0.3, 1.7), (0.1, 5.5), (2.5, 0.4)] {
                let costs = BlockCosts {
                    first,
                    layer: 1.0,
                    last,
                };
                let slowest = |layers: &[usize]| {
                    let mut of_ranks = vec![0.0; p];
                    for (layers, rank) in layers.iter().zip(&ranks) {
                        of_ranks[*rank] += *layers as f64;
                    }
                    of_ranks[ranks[0]] += first;
                    of_ranks[ranks[ranks.len() - 1]] += last;
                    of_ranks.into_iter().fold(0.0, f64::max)
                };
                let layout = PipelineLayout::balanced(num_layers, &ranks, &costs).unwrap();
                let layers = layout.num_layers();
                assert_eq!(layers.iter().sum::<usize>(), num_layers);
                assert!(layers.iter().all(|layers| *layers > 0));
                let best = ways(num_layers, ranks.len());
                let best = best.iter().map(|layers| slowest(layers));
                let best = best.fold(f64::INFINITY, f64::min);
                assert!(
                    slowest(&layers) < best + 1e-9,
                    "{ranks:?} {costs:?} {layers:?} {best}"
                );
            }
        }
    }
}
