//! Low-rank adapters: what they ask of a store and of layers, and dropout.

use std::sync::{Arc, Mutex};

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::IGNORE_INDEX;
use candle_parallel::{
    ColumnParallelLinear, Gradients, Layer, LoraConfig, LoraTargets, Loss, LowRank, ModelPart,
    ParamStore, Pass, Pipeline, PlainBlock, PlainHead, Schedule, Shard, WEIGHT_INIT, WeightFormat,
    column_parallel_linear, plain_block, plain_head,
};

use crate::check::{assert_close, assert_says, grads, message, random, single_mesh, var};
use crate::device::device;

const WIDTH: usize = 64;

/// Ones for each token.
struct Ones;

impl PlainBlock for Ones {
    fn forward(&self, tokens: &Tensor, _pass: &Pass) -> Result<Tensor> {
        let (b, t) = tokens.dims2()?;
        Tensor::ones((b, t, WIDTH), DType::F32, &device())
    }
}

/// A layer whose output is kept.
struct Seen(ColumnParallelLinear, Arc<Mutex<Vec<Tensor>>>);

impl PlainBlock for Seen {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let ys = self.0.apply(xs, pass)?;
        self.1.lock().unwrap().push(ys.detach());
        Ok(ys)
    }
}

struct Sum;

impl PlainHead for Sum {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        Ok(Loss::new(xs.sum_all()?, pass.num_targets()? as f64))
    }
}

/// A model of one linear layer that gives what its adapter's dropout leaves of its input, ones; and what it gives in each pass.
fn dropping(mesh: &Mesh, dropout: f64) -> Result<(ModelPart, Arc<Mutex<Vec<Tensor>>>)> {
    let lora = LoraConfig {
        rank: WIDTH,
        alpha: WIDTH as f64,
        dropout,
        ..LoraConfig::default()
    };
    let seen = Arc::<Mutex<Vec<Tensor>>>::default();
    let vb = ParamStore::init(0)
        .with_lora(lora)?
        .builder(DType::F32, &device());
    let part = ModelPart::build(mesh, &vb, 3, WIDTH, |index, vb| {
        Ok(match index {
            0 => plain_block(Ones),
            1 => {
                let layer = column_parallel_linear(WIDTH, WIDTH, false, &mesh.tp, vb.pp("layer"))?;
                plain_block(Seen(layer, seen.clone()))
            }
            _ => plain_head(Sum),
        })
    })?;
    let params = part.params();
    for (index, param) in params.iter().enumerate() {
        let values = match param.is_adapter {
            true => Tensor::eye(WIDTH, DType::F32, &device())?,
            false => Tensor::zeros((WIDTH, WIDTH), DType::F32, &device())?,
        };
        params.refill(index, &values)?;
    }
    Ok((part, seen))
}

/// Sequences of these tokens, each with the next one as its target, padded to `len`.
fn batch(sequences: &[&[u32]], len: usize) -> Result<Pass> {
    let (mut tokens, mut targets) = (Vec::new(), Vec::new());
    for sequence in sequences {
        for position in 0..len {
            tokens.push(sequence.get(position).copied().unwrap_or(0));
            let target = sequence.get(position).map(|id| id + 1);
            targets.push(target.unwrap_or(IGNORE_INDEX));
        }
    }
    let shape = (sequences.len(), len);
    Ok(Pass::train(
        Tensor::from_vec(tokens, shape, &Device::Cpu)?,
        Tensor::from_vec(targets, shape, &Device::Cpu)?,
    ))
}

#[test]
fn dropout_depends_on_what_is_trained_on_alone() {
    let mesh = single_mesh();
    let (part, seen) = dropping(&mesh, 0.25).unwrap();
    let run = |batch: Pass| -> Tensor {
        let mut gradients = Gradients::new(part.params(), &mesh).unwrap();
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        pipeline
            .forward_backward(&part, &[batch], &mut gradients)
            .unwrap();
        seen.lock().unwrap().pop().unwrap()
    };
    let (a, b): (Vec<u32>, Vec<u32>) = ((0..40).collect(), (7..47).collect());
    let both = run(batch(&[&a, &b], 40).unwrap()); // (2, 40, WIDTH)
    let values: Vec<f32> = both.flatten_all().unwrap().to_vec1().unwrap();
    let dropped = values.iter().filter(|value| **value == 0.0).count();
    let share = dropped as f64 / values.len() as f64;
    // Five standard deviations.
    assert!(
        (share - 0.25).abs() < 5.0 * (0.25 * 0.75 / values.len() as f64).sqrt(),
        "{share}"
    );
    let kept = values.iter().filter(|value| **value != 0.0);
    assert!(kept.copied().all(|value| (value - 4.0 / 3.0).abs() < 1e-6));
    let rows = both.flatten_to(1).unwrap().to_vec2::<f32>().unwrap();
    assert!(
        (0..80).all(|i| (0..i).all(|j| rows[i] != rows[j])),
        "two positions drop the same"
    );
    // Alone, later in the batch, and padded it drops the same.
    let of_b = both.get(1).unwrap().to_vec2::<f32>().unwrap();
    let alone = run(batch(&[&b], 43).unwrap()).get(0).unwrap();
    assert!(alone.to_vec2::<f32>().unwrap()[..40] == of_b);
    // After an update it does not, nor where nothing is trained.
    let other = b.iter().map(|id| id + 1).collect::<Vec<u32>>();
    assert!(
        run(batch(&[&other], 40).unwrap())
            .get(0)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap()
            != of_b
    );
    let mut optimizer =
        candle_parallel::DistributedOptimizer::adamw(part.params(), &mesh, Default::default())
            .unwrap();
    optimizer.set_num_steps(1);
    assert!(
        run(batch(&[&b], 40).unwrap())
            .get(0)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap()
            != of_b
    );
    let one = batch(&[&b], 40).unwrap();
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    pipeline.evaluate(&part, [Ok(one)]).unwrap();
    let inferred = seen.lock().unwrap().pop().unwrap();
    let inferred: Vec<f32> = inferred.flatten_all().unwrap().to_vec1().unwrap();
    assert!(inferred.iter().all(|value| *value == 1.0));
}

#[test]
fn a_layer_with_an_adapter_has_the_gradients_of_its_formula() {
    let (num_in, num_out, rank) = (5, 7, 3);
    let lora = LoraConfig {
        rank,
        alpha: 2.0,
        use_rslora: true,
        ..LoraConfig::default()
    };
    let store = ParamStore::init(1).with_lora(lora).unwrap();
    let vb = store.builder(DType::F32, &device());
    let tp = single_mesh().tp;
    let layer = column_parallel_linear(num_in, num_out, true, &tp, vb.pp("a.layer")).unwrap();
    let [weight, bias, a, b] = candle_parallel::Layer::weights(&layer)[..] else {
        panic!("weight, bias, A, B");
    };
    // B begins with zeros.
    assert_eq!(
        b.abs()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap(),
        0.0
    );
    let bound = a
        .abs()
        .unwrap()
        .max_all()
        .unwrap()
        .to_scalar::<f32>()
        .unwrap();
    assert!(
        bound > 0.0 && bound <= 1.0 / (num_in as f32).sqrt(),
        "{bound}"
    );
    b.slice_set(&random(2, (num_out, rank)).unwrap(), 0, 0)
        .unwrap();
    let xs = var(&random(3, (2, 4, num_in)).unwrap()).unwrap();
    let of_ys = random(4, (2, 4, num_out)).unwrap();
    let ys = layer
        .apply(xs.as_tensor(), &Pass::infer(xs.detach()))
        .unwrap();
    let got = grads(&ys, &of_ys, [xs.as_tensor(), a, b]).unwrap();

    let [a, b] = [a, b].map(|matrix| var(&matrix.detach().copy().unwrap()).unwrap());
    let flat = xs.flatten_to(1).unwrap();
    let product = |xs: &Tensor, w: &Tensor| xs.matmul(&w.t().unwrap()).unwrap();
    let scale = 2.0 / 3f64.sqrt();
    let adapted = (product(&product(&flat, &a), &b) * scale).unwrap();
    let plain = product(&flat, &weight.detach())
        .broadcast_add(&bias.detach())
        .unwrap();
    let want_ys = (plain + adapted).unwrap().reshape((2, 4, num_out)).unwrap();
    assert_close("output", &ys, &want_ys);
    let want = grads(
        &want_ys,
        &of_ys,
        [xs.as_tensor(), a.as_tensor(), b.as_tensor()],
    )
    .unwrap();
    for ((got, want), what) in got.iter().zip(&want).zip(["input", "A", "B"]) {
        assert_close(what, got, want);
    }
}

#[test]
fn adapters_that_cannot_be_made_are_refused() {
    let with = |lora: LoraConfig| message(ParamStore::init(0).with_lora(lora).map(drop));
    let default = LoraConfig::default;
    assert_says(
        &with(LoraConfig {
            rank: 0,
            ..default()
        }),
        &["rank", "is 0"],
    );
    assert_says(
        &with(LoraConfig {
            dropout: 1.0,
            ..default()
        }),
        &["dropout", "is 1"],
    );
    assert_says(
        &with(LoraConfig {
            alpha: f64::NAN,
            ..default()
        }),
        &["alpha", "NaN"],
    );
    let targets = LoraTargets::Names(vec![String::new()]);
    assert_says(
        &with(LoraConfig {
            targets,
            ..default()
        }),
        &["no linear layer is named"],
    );
    let store = ParamStore::init(0).with_lora(default()).unwrap();
    assert_says(
        &message(store.with_lora(default()).map(drop)),
        &["asked for twice", "hint"],
    );
    let store = ParamStore::init(0);
    let _vb = store.builder(DType::F32, &device());
    assert_says(
        &message(store.with_lora(default()).map(drop)),
        &["in use", "hint"],
    );
}

#[test]
fn a_weight_in_fewer_bits_is_not_handed_out_whole() {
    let store = ParamStore::init(0)
        .freeze(|_| true)
        .with_frozen_format(WeightFormat::BF16);
    let vb = store.builder(DType::F32, &device());
    let shard = Shard::new(0, 0..4, 4);
    vb.get_tiled((4, 2), "weight", shard.clone(), WEIGHT_INIT)
        .unwrap();
    let whole = vb.get_placed((4, 2), "weight", shard, WEIGHT_INIT);
    assert_says(
        &message(whole),
        &["weight is held in fewer bits", "get_tiled"],
    );
}

#[test]
fn a_layer_of_ones_own_takes_an_adapter_from_the_builder() {
    let targets = LoraTargets::Names(vec!["b.c".to_string()]);
    let lora = LoraConfig {
        rank: 2,
        targets,
        ..LoraConfig::default()
    };
    let store = ParamStore::init(0).with_lora(lora).unwrap();
    let vb = store.builder(DType::F32, &device());
    let all = Shard::new(0, 0..6, 6);
    for (name, is_target) in [
        ("a.b.c", true),
        ("b.c", true),
        ("bb.c", false),
        ("b.c.d", false),
    ] {
        let adapter = LowRank::column_parallel(4, &all, &vb.pp(name)).unwrap();
        assert_eq!(adapter.is_some(), is_target, "{name}");
    }
    let adapter = LowRank::column_parallel(4, &all, &vb.pp("b.c"))
        .unwrap()
        .unwrap();
    let (xs, ys) = (random(1, (3, 4)).unwrap(), random(2, (3, 6)).unwrap());
    // B is zero.
    assert_close(
        "output",
        &adapter
            .forward_add(&ys, &xs, &Pass::infer(xs.clone()))
            .unwrap(),
        &ys,
    );
}

#[test]
fn an_adapter_without_safetensors_says_how_it_gets_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}"#;
    std::fs::write(dir.path().join("adapter_config.json"), config).unwrap();
    std::fs::write(dir.path().join("adapter_model.bin"), "pickled").unwrap();
    let err = candle_parallel::Adapter::open(dir.path()).unwrap_err();
    let parts = [
        "has no adapter_model.safetensors",
        "hint: only safetensors weights are read; convert an adapter_model.bin",
    ];
    for part in parts {
        assert!(err.to_string().contains(part), "{err}");
    }
}
