//! Blocks with a backward pass by hand against the same blocks under candle's: every mixture of the two, every layer.

use std::collections::BTreeMap;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ops::IGNORE_INDEX;
use candle_parallel::regions::copy_to_tensor_parallel_region;
use candle_parallel::{
    Backward, Block, ColumnParallelLinear, Gradients, MicroBatch, ParamBuilder, ParamStore,
    RowParallelLinear, Shard, Stage, TrainPass, VocabParallelEmbedding, column_parallel_backward,
    column_parallel_linear, linear_cross_entropy, row_parallel_linear,
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
};

use crate::check::{assert_says, assert_values_close, floats, message, on_mesh, random_ids};
use crate::device::device;

const VOCAB: usize = 31;
const HIDDEN: usize = 6;
const WIDTH: usize = 9;
/// More rows than a chunk of the head has.
const SHAPE: (usize, usize) = (3, 190);

struct Embedding(VocabParallelEmbedding, bool);

impl Block for Embedding {
    fn forward(&self, tokens: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        self.0.forward(tokens)
    }

    fn forward_train(
        &self,
        tokens: &Tensor,
        _batch: &MicroBatch,
        _pass: &mut TrainPass<'_>,
    ) -> Result<Option<(Tensor, Backward)>> {
        let (layer, tokens) = (self.0.clone(), tokens.clone());
        let out = layer.forward_detached(&tokens)?;
        let backward: Backward = Box::new(move |dy, pass| {
            layer.backward(&dy, &tokens, pass.gradients)?;
            Ok(None)
        });
        Ok(self.1.then_some((out, backward)))
    }
}

/// x + down(left(x) * right(x)): two layers that share an input.
#[derive(Clone)]
struct Gated {
    left: ColumnParallelLinear,
    right: ColumnParallelLinear,
    down: RowParallelLinear,
    tp: ProcessGroup,
    by_hand: bool,
}

impl Gated {
    fn backward(
        &self,
        [xs, left, right, product]: [Tensor; 4],
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        let dproduct = self.down.backward(dy, Some(&product), gradients)?;
        let (dleft, dright) = ((&dproduct * right)?, (&dproduct * left)?);
        let layers = [(&self.left, &dleft), (&self.right, &dright)];
        dy + column_parallel_backward(&layers, Some(&xs), &self.tp, gradients)?
    }
}

impl Block for Gated {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        let shared = copy_to_tensor_parallel_region(xs, &self.tp)?;
        let left = self.left.clone().inside_region().forward(&shared)?;
        let right = self.right.clone().inside_region().forward(&shared)?;
        xs + self.down.forward(&(left * right)?)?
    }

    fn forward_train(
        &self,
        xs: &Tensor,
        _batch: &MicroBatch,
        _pass: &mut TrainPass<'_>,
    ) -> Result<Option<(Tensor, Backward)>> {
        if !self.by_hand {
            return Ok(None);
        }
        let left = self.left.forward_detached(xs)?;
        let right = self.right.forward_detached(xs)?;
        let product = (&left * &right)?;
        let out = self.down.forward_add_detached(&product, xs)?;
        let (block, saved) = (self.clone(), [xs.clone(), left, right, product]);
        let backward: Backward =
            Box::new(move |dy, pass| block.backward(saved, &dy, pass.gradients).map(Some));
        Ok(Some((out, backward)))
    }
}

struct Head {
    weight: Tensor,
    shard: Shard,
    tp: ProcessGroup,
    by_hand: bool,
}

impl Block for Head {
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        let layer = ColumnParallelLinear::new(self.weight.clone(), None, self.tp.clone());
        let logits = layer.forward(xs)?.flatten_to(1)?;
        let targets = batch.targets.as_ref().unwrap().flatten_all()?;
        let losses = vocab_parallel_cross_entropy(&logits, &targets, &self.shard, &self.tp)?;
        losses.to_dtype(DType::F64)?.sum_all()
    }

    fn forward_train(
        &self,
        xs: &Tensor,
        batch: &MicroBatch,
        pass: &mut TrainPass<'_>,
    ) -> Result<Option<(Tensor, Backward)>> {
        if !self.by_hand {
            return Ok(None);
        }
        let targets = batch.targets.as_ref().unwrap().flatten_all()?;
        let rows = xs.flatten_to(1)?;
        let (loss, dx) =
            linear_cross_entropy(&rows, &self.weight, &targets, &self.shard, &self.tp, pass)?;
        let dx = dx.reshape(xs.dims())?;
        let backward: Backward = Box::new(move |_, _| Ok(Some(dx)));
        Ok(Some((loss, backward)))
    }
}

fn block(
    index: usize,
    tp: &ProcessGroup,
    by_hand: [bool; 4],
    vb: ParamBuilder,
) -> Result<Box<dyn Block>> {
    let by_hand = by_hand[index];
    let vb = vb.pp(index);
    let column = |name: &str| column_parallel_linear(HIDDEN, WIDTH, true, tp, vb.pp(name));
    Ok(match index {
        0 => Box::new(Embedding(
            vocab_parallel_embedding(VOCAB, HIDDEN, tp, vb.clone())?,
            by_hand,
        )),
        3 => {
            let shard = Shard::even(0, VOCAB, tp)?;
            let init = candle_nn::Init::Randn {
                mean: 0.0,
                stdev: 0.5,
            };
            Box::new(Head {
                weight: vb.get_shard((VOCAB, HIDDEN), "weight", shard.clone(), init)?,
                shard,
                tp: tp.clone(),
                by_hand,
            })
        }
        _ => Box::new(Gated {
            left: column("left")?,
            right: column("right")?,
            down: row_parallel_linear(WIDTH, HIDDEN, true, tp, vb.pp("down"))?,
            tp: tp.clone(),
            by_hand,
        }),
    })
}

fn micro_batches() -> Result<Vec<MicroBatch>> {
    let ids = |seed: u64| random_ids(seed, SHAPE.0 * SHAPE.1, VOCAB);
    let batch = |seed: u64| {
        let mut targets = ids(seed + 10);
        targets[7] = IGNORE_INDEX;
        Ok(MicroBatch {
            tokens: Tensor::from_vec(ids(seed), SHAPE, &Device::Cpu)?,
            targets: Some(Tensor::from_vec(targets, SHAPE, &Device::Cpu)?),
        })
    };
    (0..2).map(batch).collect()
}

/// Loss, and the local gradients by name.
type Passes = (f64, BTreeMap<String, Vec<f32>>);

fn run(mesh: &Mesh, by_hand: [bool; 4], frozen: &'static str) -> Result<Passes> {
    let store = ParamStore::init(5).freeze(move |name| !frozen.is_empty() && name.contains(frozen));
    let vb = store.builder(DType::F32, &device());
    let stage = Stage::build(mesh, &vb, 4, HIDDEN, |index, vb| {
        block(index, &mesh.tp, by_hand, vb)
    })?;
    let mut gradients = Gradients::new(stage.params(), mesh)?;
    let pipeline = candle_parallel::Pipeline::new(
        candle_parallel::Schedule::OneForwardOneBackward,
        mesh.pp.clone(),
    );
    let batches = micro_batches()?;
    let mut num_targets = 0;
    for batch in &batches {
        num_targets += batch.num_targets()?;
    }
    let report = pipeline.forward_backward(&stage, &batches, num_targets, &mut gradients)?;
    let mut grads = BTreeMap::new();
    for (index, param) in stage.params().iter().enumerate() {
        if param.trainable {
            grads.insert(param.name.clone(), floats(&gradients.get(index)?)?);
        }
    }
    let loss = report.loss_sum.map(|sum| sum.to_scalar::<f64>());
    Ok((loss.transpose()?.unwrap_or(0.0), grads))
}

fn assert_same(got: &Passes, want: &Passes) {
    assert!((got.0 - want.0).abs() <= 1e-6 * want.0.abs());
    assert_eq!(got.1.len(), want.1.len());
    for (name, grad) in &want.1 {
        assert_values_close(name, &got.1[name], grad);
    }
}

#[test]
fn every_mixture_gives_the_gradients_of_candles_graph() {
    for (pp, tp) in [(1, 1), (1, 2), (1, 3), (2, 2)] {
        on_mesh((pp, 1, tp), |mesh| {
            let graph = run(&mesh, [false; 4], "")?;
            for mixture in 1..16usize {
                let by_hand = [0, 1, 2, 3].map(|bit| mixture >> bit & 1 == 1);
                assert_same(&run(&mesh, by_hand, "")?, &graph);
            }
            Ok(())
        });
    }
}

#[test]
fn frozen_weights_get_no_gradient_and_do_not_change_the_others() {
    for frozen in ["left", "down.weight", "0.weight", "3.weight", "bias"] {
        on_mesh((1, 1, 2), |mesh| {
            let (loss, mut all) = run(&mesh, [true; 4], "")?;
            let part = run(&mesh, [true; 4], frozen)?;
            let num_params = all.len();
            all.retain(|name, _| !name.contains(frozen));
            assert!(all.len() < num_params, "{frozen} names something");
            assert_same(&part, &(loss, all));
            Ok(())
        });
    }
}

#[test]
fn a_weight_that_is_no_parameter_is_an_error() {
    on_mesh((1, 1, 1), |mesh| {
        let vb = ParamStore::init(5).builder(DType::F32, &device());
        let stage = Stage::build(&mesh, &vb, 4, HIDDEN, |index, vb| {
            block(index, &mesh.tp, [true; 4], vb)
        })?;
        let mut gradients = Gradients::new(stage.params(), &mesh)?;
        let foreign = candle_core::Var::zeros((2, 3), DType::F32, &device())?;
        let said = message(gradients.write(foreign.as_tensor(), |_, _| Ok(())));
        assert_says(&said, &["[2, 3]", "none of this stage's parameters"]);
        Ok(())
    });
}

/// Multiplies by a weight, and forgets to write the weight's gradient.
struct Forgetful(Tensor);

impl Block for Forgetful {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        xs.broadcast_mul(&self.0)
    }

    fn forward_train(
        &self,
        xs: &Tensor,
        _batch: &MicroBatch,
        _pass: &mut TrainPass<'_>,
    ) -> Result<Option<(Tensor, Backward)>> {
        let weight = self.0.detach();
        let out = xs.broadcast_mul(&weight)?;
        let backward: Backward = Box::new(move |dy, _| dy.broadcast_mul(&weight).map(Some));
        Ok(Some((out, backward)))
    }
}

#[test]
fn a_forgotten_gradient_is_an_error_with_the_name_of_the_parameter() {
    on_mesh((1, 1, 1), |mesh| {
        let vb = ParamStore::init(5).builder(DType::F32, &device());
        let stage = Stage::build(&mesh, &vb, 4, HIDDEN, |index, vb| match index {
            2 => {
                let weight = vb
                    .pp("scale")
                    .get(HIDDEN, "weight", candle_nn::Init::Const(1.0))?;
                Ok(Box::new(Forgetful(weight)))
            }
            _ => block(index, &mesh.tp, [true; 4], vb),
        })?;
        let mut gradients = Gradients::new(stage.params(), &mesh)?;
        let pipeline =
            candle_parallel::Pipeline::new(candle_parallel::Schedule::GPipe, mesh.pp.clone());
        let passes = pipeline.forward_backward(&stage, &micro_batches()?, 598, &mut gradients);
        assert_says(
            &message(passes),
            &["block 2", "scale.weight", "got no gradient"],
        );
        Ok(())
    });
}
