//! Blocks with an explicit backward pass against the same blocks under candle's: every mixture of the two, every layer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::IGNORE_INDEX;
use candle_parallel::regions::copy_to_tensor_parallel_region;
use candle_parallel::{
    Block, ColumnParallelLinear, GradientSink, Gradients, Head, Layer, Loss, ModelPart,
    ParamBuilder, ParamStore, Pass, Pipeline, PlainBlock, PlainHead, Recompute, RowParallelLinear,
    Schedule, Shard, column_parallel_backward, column_parallel_linear, head_block, layer_block,
    linear_cross_entropy, plain_block, plain_head, row_parallel_linear,
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
};

use crate::check::{
    UNREDUCED, assert_says, assert_values_close, floats, message, on_mesh, random_ids,
};
use crate::device::device;

const VOCAB: usize = 31;
const HIDDEN: usize = 6;
const WIDTH: usize = 9;
/// More rows than a chunk of the head has.
const SHAPE: (usize, usize) = (3, 190);

/// x + down(left(x) * right(x)): two layers that share an input.
#[derive(Clone)]
struct Gated {
    left: ColumnParallelLinear,
    right: ColumnParallelLinear,
    down: RowParallelLinear,
    tp: ProcessGroup,
}

impl Layer for Gated {
    type Saved = [Tensor; 4];

    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        let (left, _) = self.left.forward(xs, pass)?;
        let (right, _) = self.right.forward(xs, pass)?;
        let product = (&left * &right)?;
        let (out, _) = self.down.forward_add(&product, Some(xs), pass)?;
        Ok((out, [xs.clone(), left, right, product]))
    }

    fn backward(
        &self,
        [xs, left, right, product]: Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let dproduct = self
            .down
            .backward_linear(dy, Some(&product), pass, gradients)?;
        let (dleft, dright) = ((&dproduct * right)?, (&dproduct * left)?);
        let layers = [(&self.left, &dleft), (&self.right, &dright)];
        let dx = column_parallel_backward(&layers, Some(&xs), pass, gradients)?;
        (dy + dx).map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        let column = [&self.left, &self.right].into_iter();
        let column = column.flat_map(Layer::weights);
        column.chain(self.down.weights()).collect()
    }
}

/// The same of candle's operations and the layers' own nodes.
impl PlainBlock for Gated {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let shared = copy_to_tensor_parallel_region(xs, &self.tp)?;
        let left = self.left.clone().inside_region().apply(&shared, pass)?;
        let right = self.right.clone().inside_region().apply(&shared, pass)?;
        xs + self.down.apply(&(left * right)?, pass)?
    }
}

/// A whole layer as one node of candle's graph.
struct InGraph<L>(L);

impl<L> PlainBlock for InGraph<L>
where
    L: Layer + Clone + 'static,
    L::Saved: Clone + Send + Sync + 'static,
{
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.0.apply(xs, pass)
    }
}

#[derive(Clone)]
struct LastBlock {
    weight: Tensor,
    shard: Shard,
    tp: ProcessGroup,
}

impl PlainHead for LastBlock {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let layer = ColumnParallelLinear::new(self.weight.clone(), None, self.tp.clone());
        let logits = layer.apply(xs, pass)?.flatten_to(1)?;
        let targets = pass.targets()?.flatten_all()?;
        let losses = vocab_parallel_cross_entropy(&logits, &targets, &self.shard, &self.tp)?;
        let sum = losses.to_dtype(DType::F64)?.sum_all()?;
        Ok(Loss::new(sum, pass.num_targets()? as f64))
    }
}

impl Head for LastBlock {
    fn loss(
        &self,
        xs: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Loss, Option<Tensor>)> {
        let (sum, dx) = linear_cross_entropy(
            &xs.flatten_to(1)?,
            &self.weight.clone().into(),
            &pass.targets()?.flatten_all()?,
            &self.shard,
            &self.tp,
            pass.loss_scale(),
            gradients,
        )?;
        let loss = Loss::new(sum, pass.num_targets()? as f64);
        Ok((loss, Some(dx.reshape(xs.dims())?)))
    }

    fn evaluate(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        PlainHead::loss(self, xs, pass)
    }

    fn logits(&self, xs: &Tensor, rows: &[usize], pass: &Pass) -> Result<Tensor> {
        PlainHead::logits(self, xs, rows, pass)
    }
}

/// Block `index`, with an explicit backward pass or by candle's graph; layers of odd index are one node of that graph.
fn block(index: usize, tp: &ProcessGroup, explicit: [bool; 4], vb: ParamBuilder) -> Result<Block> {
    let explicit = explicit[index];
    let vb = vb.pp(index);
    let column = |name: &str| column_parallel_linear(HIDDEN, WIDTH, true, tp, vb.pp(name));
    Ok(match index {
        0 => {
            let embedding = vocab_parallel_embedding(VOCAB, HIDDEN, tp, vb.clone())?;
            match explicit {
                true => layer_block(embedding),
                false => plain_block(InGraph(embedding)),
            }
        }
        3 => {
            let shard = Shard::even(0, VOCAB, tp)?;
            let init = candle_nn::Init::Randn {
                mean: 0.0,
                stdev: 0.5,
            };
            let head = LastBlock {
                weight: vb.get_placed((VOCAB, HIDDEN), "weight", shard.clone(), init)?,
                shard,
                tp: tp.clone(),
            };
            match explicit {
                true => head_block(head),
                false => plain_head(head),
            }
        }
        _ => {
            let gated = Gated {
                left: column("left")?,
                right: column("right")?,
                down: row_parallel_linear(WIDTH, HIDDEN, true, tp, vb.pp("down"))?,
                tp: tp.clone(),
            };
            match (explicit, index) {
                (true, _) => layer_block(gated),
                (false, 1) => plain_block(InGraph(gated)),
                (false, _) => plain_block(gated),
            }
        }
    })
}

fn micro_batches() -> Result<Vec<Pass>> {
    let ids = |seed: u64| random_ids(seed, SHAPE.0 * SHAPE.1, VOCAB);
    let batch = |seed: u64| {
        let mut targets = ids(seed + 10);
        targets[7] = IGNORE_INDEX;
        Ok(Pass::train(
            Tensor::from_vec(ids(seed), SHAPE, &Device::Cpu)?,
            Tensor::from_vec(targets, SHAPE, &Device::Cpu)?,
        ))
    };
    (0..2).map(batch).collect()
}

/// Loss, and the local gradients by name.
type Passes = (f64, BTreeMap<String, Vec<f32>>);

fn run(mesh: &Mesh, explicit: [bool; 4], frozen: &'static str) -> Result<Passes> {
    run_recomputing(mesh, explicit, frozen, |_| Recompute::None)
}

fn run_recomputing(
    mesh: &Mesh,
    explicit: [bool; 4],
    frozen: &'static str,
    recompute: fn(usize) -> Recompute,
) -> Result<Passes> {
    let store = ParamStore::init(5).with_data_parallel(UNREDUCED);
    let store = match frozen {
        "" => store,
        frozen => store.freeze(move |name| name.contains(frozen)),
    };
    let vb = store.builder(DType::F32, &device());
    let part = ModelPart::build(mesh, &vb, 4, HIDDEN, |index, vb| {
        block(index, &mesh.tp, explicit, vb)
    })?;
    let part = part.with_recompute(recompute);
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    let batches = micro_batches()?;
    let report = pipeline.forward_backward(&part, &batches, &mut gradients)?;
    let mut grads = BTreeMap::new();
    for (index, param) in part.params().iter().enumerate() {
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
                let explicit = [0, 1, 2, 3].map(|bit| mixture >> bit & 1 == 1);
                assert_same(&run(&mesh, explicit, "")?, &graph);
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
fn recomputed_blocks_of_every_kind_give_the_same_bits() {
    let modes: [fn(usize) -> Recompute; 2] = [
        |_| Recompute::Full,
        |index| match index {
            2 => Recompute::Full,
            _ => Recompute::None,
        },
    ];
    for (pp, tp) in [(1, 1), (1, 3), (2, 2)] {
        on_mesh((pp, 1, tp), |mesh| {
            for frozen in ["", "0.weight", "left", "down"] {
                for mixture in [0b0000, 0b1010, 0b0101, 0b1111] {
                    let explicit = [0, 1, 2, 3].map(|bit| mixture >> bit & 1 == 1);
                    let kept = run(&mesh, explicit, frozen)?;
                    for mode in modes {
                        assert!(run_recomputing(&mesh, explicit, frozen, mode)? == kept);
                    }
                }
            }
            Ok(())
        });
    }
}

/// How many products were kept at a time at most, and how often the forward pass ran.
#[derive(Default)]
struct Counts {
    kept: AtomicUsize,
    most_kept: AtomicUsize,
    forwards: AtomicUsize,
}

struct KeptProduct(Arc<Counts>, Tensor);

impl KeptProduct {
    fn new(counts: &Arc<Counts>, product: Tensor) -> Self {
        let kept = counts.kept.fetch_add(1, Ordering::Relaxed) + 1;
        counts.most_kept.fetch_max(kept, Ordering::Relaxed);
        Self(counts.clone(), product)
    }
}

impl Drop for KeptProduct {
    fn drop(&mut self) {
        self.0.kept.fetch_sub(1, Ordering::Relaxed);
    }
}

/// (xs * scale)², which keeps the product.
#[derive(Clone)]
struct Squared(Tensor, Arc<Counts>);

impl Layer for Squared {
    type Saved = (Tensor, KeptProduct);

    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        self.1.forwards.fetch_add(1, Ordering::Relaxed);
        let product = xs.broadcast_mul(&self.0.detach())?;
        let saved = KeptProduct::new(&self.1, product.clone());
        Ok((product.sqr()?, (xs.clone(), saved)))
    }

    fn backward(
        &self,
        (xs, kept): Self::Saved,
        dy: &Tensor,
        _pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let scale = self.0.detach();
        let dproduct = (dy * (&kept.1 * 2.0)?)?;
        let dscale = (&dproduct * xs)?.sum((0, 1))?;
        gradients.put_grad(&self.0, dscale)?;
        dproduct.broadcast_mul(&scale).map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.0]
    }
}

#[test]
fn each_mode_keeps_what_it_says_and_runs_forward_as_often() {
    on_mesh((1, 1, 1), |mesh| {
        let run = |recompute: Recompute| {
            let counts = Arc::new(Counts::default());
            let vb = ParamStore::init(5)
                .with_data_parallel(UNREDUCED)
                .builder(DType::F32, &device());
            let part = ModelPart::build(&mesh, &vb, 4, HIDDEN, |index, vb| match index {
                1 | 2 => {
                    let init = candle_nn::Init::Const(index as f64);
                    let scale = vb.pp(index).get(HIDDEN, "scale", init)?;
                    Ok(layer_block(Squared(scale, counts.clone())))
                }
                _ => block(index, &mesh.tp, [true; 4], vb),
            })?;
            let part = part.with_recompute(|_| recompute);
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            pipeline.forward_backward(&part, &micro_batches()?, &mut gradients)?;
            let values = (0..part.params().len()).map(|index| floats(&gradients.get(index)?));
            let [most_kept, forwards] =
                [&counts.most_kept, &counts.forwards].map(|count| count.load(Ordering::Relaxed));
            Ok::<_, candle_core::Error>((most_kept, forwards, values.collect::<Result<Vec<_>>>()?))
        };
        // Two blocks, two micro-batches, all forward passes first.
        let (most_kept, forwards, kept) = run(Recompute::None)?;
        assert_eq!((most_kept, forwards), (4, 4));
        let (most_kept, forwards, gradients) = run(Recompute::Full)?;
        assert_eq!((most_kept, forwards), (1, 8));
        assert!(gradients == kept, "other bits");
        Ok(())
    });
}

/// Other values at each call.
struct Dropout(Tensor);

impl PlainBlock for Dropout {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        let mask = Tensor::rand(0f32, 1f32, xs.dims(), xs.device())?;
        xs.broadcast_mul(&self.0)?.mul(&mask)
    }
}

#[test]
fn a_block_that_draws_other_numbers_when_it_runs_again_is_an_error_with_its_index() {
    on_mesh((1, 1, 1), |mesh| {
        let run = |recompute: fn(usize) -> Recompute| {
            let vb = ParamStore::init(5)
                .with_data_parallel(UNREDUCED)
                .builder(DType::F32, &device());
            let part = ModelPart::build(&mesh, &vb, 4, HIDDEN, |index, vb| match index {
                2 => {
                    let weight = vb.get(HIDDEN, "scale", candle_nn::Init::Const(1.0))?;
                    Ok(plain_block(Dropout(weight)))
                }
                _ => block(index, &mesh.tp, [true; 4], vb),
            })?;
            let part = part.with_recompute(recompute);
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            pipeline.forward_backward(&part, &micro_batches()?, &mut gradients)
        };
        let said = message(run(|_| Recompute::Full));
        assert_says(&said, &["block 2", "run again", "with_recompute"]);
        run(|index| match index {
            2 => Recompute::None,
            _ => Recompute::Full,
        })?;
        Ok(())
    });
}

#[test]
fn a_weight_that_is_no_parameter_is_an_error() {
    on_mesh((1, 1, 1), |mesh| {
        let vb = ParamStore::init(5)
            .with_data_parallel(UNREDUCED)
            .builder(DType::F32, &device());
        let part = ModelPart::build(&mesh, &vb, 4, HIDDEN, |index, vb| {
            block(index, &mesh.tp, [true; 4], vb)
        })?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let foreign = candle_core::Var::zeros((2, 3), DType::F32, &device())?;
        let said = message(gradients.put(foreign.as_tensor(), Box::new(|_, _| Ok(()))));
        assert_says(&said, &["[2, 3]", "no parameter of this model"]);
        let param = part.params().get(0);
        let grad = Tensor::zeros((2, 3), DType::F32, &device())?;
        let said = message(gradients.put_grad(&param.tensor(), grad));
        assert_says(&said, &[&param.name, "has shape [2, 3]", "expected"]);
        Ok(())
    });
}

/// Multiplies by a weight, and forgets to write the weight's gradient.
#[derive(Clone)]
struct Forgetful(Tensor);

impl Layer for Forgetful {
    type Saved = ();

    fn forward(&self, xs: &Tensor, _: &Pass) -> Result<(Tensor, ())> {
        Ok((xs.broadcast_mul(&self.0.detach())?, ()))
    }

    fn backward(
        &self,
        _: (),
        dy: &Tensor,
        _: &Pass,
        _: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        dy.broadcast_mul(&self.0.detach()).map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.0]
    }
}

#[test]
fn a_forgotten_gradient_is_an_error_with_the_name_of_the_parameter() {
    on_mesh((1, 1, 1), |mesh| {
        let vb = ParamStore::init(5)
            .with_data_parallel(UNREDUCED)
            .builder(DType::F32, &device());
        let part = ModelPart::build(&mesh, &vb, 4, HIDDEN, |index, vb| match index {
            2 => {
                let weight = vb
                    .pp("scale")
                    .get(HIDDEN, "weight", candle_nn::Init::Const(1.0))?;
                Ok(layer_block(Forgetful(weight)))
            }
            _ => block(index, &mesh.tp, [true; 4], vb),
        })?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let passes = pipeline.forward_backward(&part, &micro_batches()?, &mut gradients);
        assert_says(
            &message(passes),
            &["block 2", "scale.weight", "got no gradient"],
        );
        Ok(())
    });
}
