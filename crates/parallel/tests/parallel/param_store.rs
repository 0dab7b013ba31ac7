//! Initial values on every layout, frozen parameters, candle's own layers.

use candle_comm::Mesh;
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, Linear};
use candle_parallel::{
    AdamWConfig, DataParallel, DistributedOptimizer, Gradients, Loss, ModelPart, ParamStore, Pass,
    Pipeline, PlainBlock, PlainHead, Schedule, Shard, ZeroStage, plain_block, plain_head,
};

use crate::chain::{Chain, HIDDEN, Values, gather_gradients, gather_weights, local_bits};
use crate::check::{assert_says, assert_values_close, message, on_mesh, single_mesh};
use crate::device::device;

fn initial(seed: u64, layout: (usize, usize, usize)) -> Values {
    let chain = Chain::default();
    let all = on_mesh(layout, |mesh| {
        gather_weights(&chain.part(&mesh, &ParamStore::init(seed))?, &mesh)
    });
    all.into_iter().next().unwrap()
}

#[test]
fn initial_values_do_not_depend_on_the_layout() {
    let expected = initial(5, (1, 1, 1));
    assert_eq!(expected.len(), 2 + 3 * 5);
    for layout in [(1, 1, 2), (1, 1, 3), (1, 1, 4), (3, 1, 2), (2, 2, 1)] {
        assert_eq!(initial(5, layout), expected, "{layout:?}");
    }
}

#[test]
fn names_and_seeds_give_different_values() {
    let values = initial(5, (1, 1, 1));
    assert_ne!(
        values["layers.0.up.weight"], values["layers.1.up.weight"],
        "same shape, other name"
    );
    assert_ne!(
        initial(6, (1, 1, 1))["embed.weight"],
        values["embed.weight"]
    );
    assert!(values["layers.0.norm.weight"].iter().all(|x| *x == 1.0));
    assert!(values["layers.0.up.bias"].iter().all(|x| *x == 0.0));
}

#[test]
fn weights_have_the_standard_deviation_of_llama() {
    let store = ParamStore::init(1);
    let vb = store.builder(DType::F32, &device());
    let weight = vb
        .get((200, 100), "w", candle_parallel::WEIGHT_INIT)
        .unwrap();
    let values = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let mean = values.iter().sum::<f32>() / 2e4;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / 2e4;
    assert!(mean.abs() < 1e-3 && (variance.sqrt() - 0.02).abs() < 5e-4);
}

fn train(mesh: &Mesh, part: &ModelPart, chain: &Chain, steps: u64) -> Result<()> {
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let config = AdamWConfig::default();
    let mut optimizer = DistributedOptimizer::adamw(part.params(), mesh, config)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    for step in 0..steps {
        let batches = chain.micro_batches(step + 10 * mesh.dp.rank() as u64, 2)?;
        pipeline.forward_backward(part, &batches, &mut gradients)?;
        optimizer.step(&mut gradients, 0.01, Some(1.0))?;
    }
    Ok(())
}

#[test]
fn what_is_frozen_does_not_move_on_any_layout() {
    let chain = Chain::default();
    let mut trained = Vec::new();
    for layout in [(1, 1, 1), (2, 1, 2), (3, 2, 1)] {
        let all = on_mesh(layout, |mesh| {
            let store = ParamStore::init(5).freeze(|name| !name.contains("norm"));
            let part = chain.part(&mesh, &store)?;
            let before = local_bits(&part);
            train(&mesh, &part, &chain, 3)?;
            for (name, bits) in local_bits(&part) {
                assert_eq!(bits != before[&name], name.contains("norm"), "{name}");
            }
            let gradients = Gradients::new(part.params(), &mesh)?;
            for (index, param) in part.params().iter().enumerate() {
                assert_eq!(param.trainable, param.name.contains("norm"));
                assert_says(&message(gradients.get(index)), &[&param.name]);
            }
            gather_weights(&part, &mesh)
        });
        trained.extend(all.into_iter().next());
    }
    // Other replicas of (3, 2, 1) see other data: only the layouts of one replica agree.
    for (name, values) in &trained[0] {
        assert_values_close(name, &trained[1][name], values);
    }
}

#[test]
fn every_rank_must_freeze_the_same() {
    let chain = Chain {
        tied: true,
        ..Chain::default()
    };
    for layout in [(2, 1, 1), (1, 2, 1), (1, 1, 2)] {
        on_mesh(layout, |mesh| {
            let rank = mesh.world.rank();
            let store = ParamStore::init(5).freeze(move |name| rank == 1 && name == "embed.weight");
            let said = message(chain.part(&mesh, &store).map(drop));
            assert_says(&said, &["embed.weight", "frozen", "rank 1", "hint: "]);
            Ok(())
        });
    }
}

#[test]
fn a_frozen_parameter_takes_no_gradient() {
    let chain = Chain::default();
    let mesh = single_mesh();
    let store = ParamStore::init(5).freeze(|name| name == "embed.weight");
    let part = chain.part(&mesh, &store).unwrap();
    let mut gradients = Gradients::new(part.params(), &mesh).unwrap();
    let grad = part.params().get(0).values().unwrap();
    assert_eq!(part.params().get(0).name, "embed.weight");
    let said = message(gradients.accumulate(0, &grad));
    assert_says(&said, &["embed.weight", "frozen"]);
}

#[test]
fn a_parameter_asked_for_twice_must_be_the_same() {
    let store = ParamStore::init(1);
    let vb = store.builder(DType::F32, &device());
    let init = Init::Const(1.0);
    vb.get((2, 3), "a", init).unwrap();
    vb.get((2, 3), "a", init).unwrap();
    let said = message(vb.get((3, 2), "a", init));
    assert_says(
        &said,
        &["parameter a is asked for twice", "[2, 3]", "[3, 2]"],
    );
    let shard = Shard::new(0, 1..4, 5);
    let said = message(vb.get_placed((4, 3), "b", shard, init));
    assert_says(&said, &["parameter b", "[4, 3]"]);
}

/// First block: a learned table, by candle's embedding.
struct First(candle_nn::Embedding);

/// Last block: candle's linear layer.
struct Last(Linear);

impl PlainBlock for First {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        self.0.forward(&xs.to_device(&device())?)
    }
}

impl PlainHead for Last {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let sum = self.0.forward(xs)?.sqr()?.sum_all()?;
        Ok(Loss::new(sum, pass.num_targets()? as f64))
    }
}

#[test]
fn layers_of_candle_take_their_parameters_from_the_store() {
    let chain = Chain::default();
    for tp in [1, 2] {
        let all = on_mesh((1, 1, tp), |mesh| {
            let replicas = DataParallel {
                zero: ZeroStage::Zero,
                overlap: false,
                ..DataParallel::default()
            };
            let vb = ParamStore::init(3)
                .with_data_parallel(replicas)
                .builder(DType::F32, &device());
            let part = ModelPart::build(&mesh, &vb, 2, HIDDEN, |index, vb| {
                let vb = vb.var_builder();
                Ok(match index {
                    0 => plain_block(First(candle_nn::embedding(
                        chain.vocab,
                        HIDDEN,
                        vb.pp("embed"),
                    )?)),
                    _ => plain_head(Last(candle_nn::linear(HIDDEN, 4, vb.pp("out"))?)),
                })
            })?;
            let names: Vec<_> = part.params().iter().map(|p| p.name.as_str()).collect();
            assert_eq!(names, ["embed.weight", "out.bias", "out.weight"]);
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let batches = chain.micro_batches(1, 2)?;
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            let values = gather_gradients(&part, &mesh, &gradients)?;
            assert_eq!(part.params().num_global_values(), (13 * 6) + 4 * 6 + 4);
            let config = AdamWConfig::default();
            DistributedOptimizer::adamw(part.params(), &mesh, config)?
                .step(&mut gradients, 0.1, None)
                .map(|report| (report.grad_norm, values))
        });
        let (norm, gradients) = &all[0];
        let squares = gradients.values().flatten().map(|x| f64::from(*x).powi(2));
        // Of the sum of the losses of 12 targets.
        let expected = squares.sum::<f64>().sqrt() / 12.0;
        // What every rank of the group holds counts once.
        assert!((norm - expected).abs() < 1e-9 * expected, "tp {tp}");
    }
}
