//! A decoder layer as a node of candle's graph, against the same layer in candle's own operations.

use std::cell::Cell;
use std::process::Command;
use std::sync::Arc;

use candle_comm::launch::threads;
use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_ops::ProductChoice;
use candle_parallel::{Layer, LayerRanks, ParamStore, Pass};
use candle_train_models::{DecoderLayer, ModelConfig, RotaryTable};

const B: usize = 2;
const T: usize = 5;
/// Terms of the longest sum in the layer: a value goes through as many roundings of f32, which add up like a random walk.
const LONGEST_SUM: f64 = 24.0;
/// References with errors, of which the largest error is the bound.
const NUM_DRAWS: usize = 8;

fn config() -> ModelConfig {
    ModelConfig::from_json(
        r#"{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "attention_bias": true}"#,
    )
    .unwrap()
}

/// Names and global shapes of the layer's weights, in the order of its `weights()`.
fn shapes() -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("input_layernorm.weight", vec![24]),
        ("post_attention_layernorm.weight", vec![24]),
        ("self_attn.q_proj.weight", vec![24, 24]),
        ("self_attn.q_proj.bias", vec![24]),
        ("self_attn.k_proj.weight", vec![8, 24]),
        ("self_attn.k_proj.bias", vec![8]),
        ("self_attn.v_proj.weight", vec![8, 24]),
        ("self_attn.v_proj.bias", vec![8]),
        ("self_attn.o_proj.weight", vec![24, 24]),
        ("self_attn.o_proj.bias", vec![24]),
        ("self_attn.q_norm.weight", vec![4]),
        ("self_attn.k_norm.weight", vec![4]),
        ("mlp.gate_proj.weight", vec![20, 24]),
        ("mlp.up_proj.weight", vec![20, 24]),
        ("mlp.down_proj.weight", vec![24, 20]),
    ]
}

/// Any values, about 1 in size, a function of their place, that f32 has and bf16 has not.
fn values(seed: usize, dims: &[usize]) -> Result<Tensor> {
    let len: usize = dims.iter().product();
    let value = |i: usize| f64::from(((i * 37 + seed * 101) % 89) as f32 / 44.5 - 1.0);
    Tensor::from_iter((0..len).map(value), &Device::Cpu)?.reshape(dims)
}

/// What each value on the way is off by, of itself; and so each gradient, as it goes back the same way.
struct Errors {
    size: f64,
    seed: Cell<usize>,
}

impl Errors {
    fn on(&self, x: Tensor) -> Result<Tensor> {
        self.seed.set(self.seed.get() + 1);
        let errors = (values(self.seed.get(), x.dims())? * self.size)?;
        x * (errors + 1.0)?
    }
}

/// The layer and its gradients in f64, by name; "x" is the input, "y" the output.
fn reference(
    weights: &[(&str, Var)],
    x: &Var,
    dy: &Tensor,
    errors: &Errors,
) -> Result<Vec<(String, Tensor)>> {
    let config = config();
    let w = |name: &str| {
        weights
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap()
            .1
            .as_tensor()
            .clone()
    };
    let linear = |x: &Tensor, name: &str, has_bias: bool| -> Result<Tensor> {
        let y = x.broadcast_matmul(&w(&format!("{name}.weight")).t()?)?;
        errors.on(match has_bias {
            true => y.broadcast_add(&w(&format!("{name}.bias")))?,
            false => y,
        })
    };
    let norm = |x: &Tensor, name: &str| -> Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + config.rms_norm_eps)?;
        errors.on(x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(&w(name))?)
    };
    let (cos, sin) = RotaryTable::new(&config, &Device::Cpu).get(T)?;
    let (cos, sin) = (cos.to_dtype(DType::F64)?, sin.to_dtype(DType::F64)?);
    // Of q and k they are normalised and turned.
    let heads = |x: &Tensor, num: usize, norm_name: Option<&str>| -> Result<Tensor> {
        let x = x.reshape((B, T, num, 4))?.transpose(1, 2)?.contiguous()?;
        let x = match norm_name {
            None => return Ok(x),
            Some(name) => norm(&x, name)?,
        };
        let (a, b) = (x.narrow(3, 0, 2)?, x.narrow(3, 2, 2)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        errors.on(Tensor::cat(&[first, second], 3)?)
    };
    // Key/value head of each query head.
    let repeat = |x: &Tensor| {
        let each = (0..6).map(|head| x.narrow(1, head / 3, 1));
        Tensor::cat(&each.collect::<Result<Vec<_>>>()?, 1)
    };
    let mask = (0..T * T).map(|i| {
        if i % T > i / T {
            f64::NEG_INFINITY
        } else {
            0.0
        }
    });
    let mask = Tensor::from_iter(mask, &Device::Cpu)?.reshape((T, T))?;
    let normed = norm(x, "input_layernorm.weight")?;
    let [q, k, v] =
        ["q", "k", "v"].map(|name| linear(&normed, &format!("self_attn.{name}_proj"), true));
    let q = heads(&q?, 6, Some("self_attn.q_norm.weight"))?;
    let k = repeat(&heads(&k?, 2, Some("self_attn.k_norm.weight"))?)?;
    let v = repeat(&heads(&v?, 2, None)?)?;
    let scores = errors.on((q.matmul(&k.t()?.contiguous()?)? * 0.5)?)?;
    let scores = scores.broadcast_add(&mask)?;
    // Divided by its sum last, as in attention without the probabilities of all positions: what goes back through the sum is that of
    // dy * y, summed over the head's dims, and the errors of these products do not cancel those of the other sums.
    let largest = scores
        .log_sum_exp(D::Minus1)?
        .unsqueeze(D::Minus1)?
        .detach();
    let odds = scores.broadcast_sub(&largest)?.exp()?;
    let log_sum = odds.sum_keepdim(D::Minus1)?.log()?;
    let ys = errors.on(odds)?.matmul(&v)?;
    let division = errors
        .on(ys.ones_like()?)?
        .broadcast_mul(&log_sum)?
        .neg()?
        .exp()?;
    let ys = errors.on((ys * division)?)?;
    let ys = ys.transpose(1, 2)?.reshape((B, T, 24))?;
    let middle = errors.on((x.as_tensor() + linear(&ys, "self_attn.o_proj", true)?)?)?;
    let normed = norm(&middle, "post_attention_layernorm.weight")?;
    let gate = linear(&normed, "mlp.gate_proj", false)?.silu()?;
    let product = errors.on((gate * linear(&normed, "mlp.up_proj", false)?)?)?;
    let y = errors.on((middle + linear(&product, "mlp.down_proj", false)?)?)?;
    let grads = (&y * dy)?.sum_all()?.backward()?;
    let mut all = vec![
        ("y".to_string(), y.detach()),
        ("x".to_string(), grads.get(x).unwrap().clone()),
    ];
    for (name, var) in weights {
        all.push((name.to_string(), grads.get(var).unwrap().clone()));
    }
    Ok(all)
}

/// The same by a [`DecoderLayer`] in the middle of a graph, of which this rank has a part.
fn ours(
    tp: &ProcessGroup,
    weights: &[(&str, Var)],
    x: &Tensor,
    dy: &Tensor,
) -> Result<Vec<(String, Tensor)>> {
    let config = config();
    let dir = tempfile::tempdir().unwrap();
    let tensors: std::collections::HashMap<_, _> = weights
        .iter()
        .map(|(name, var)| Ok((name.to_string(), var.to_dtype(DType::F32)?)))
        .collect::<Result<_>>()?;
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    let vb = ParamStore::from_pretrained(dir.path())?.builder(DType::F32, &Device::Cpu);
    let rotary = Arc::new(RotaryTable::new(&config, &Device::Cpu));
    let layer = DecoderLayer::new(&config, 0, rotary, &LayerRanks::tensor_parallel(tp), vb)?;
    // Plain operations before and after.
    let leaf = Var::from_tensor(&(x.to_dtype(DType::F32)? * 0.5)?)?;
    let y = layer.apply(
        &(leaf.as_tensor() * 2.0)?,
        &Pass::infer(leaf.as_detached_tensor()),
    )?;
    let grads = (&y * dy.to_dtype(DType::F32)?)?.sum_all()?.backward()?;
    let dx = (grads.get(&leaf).unwrap() * 0.5)?;
    let mut all = vec![("y".to_string(), y.detach()), ("x".to_string(), dx)];
    for ((name, _), held) in shapes().iter().zip(layer.weights()) {
        let mut grad = grads.get(held).unwrap().clone();
        // Each rank has it of its own heads.
        if name.contains("q_norm") || name.contains("k_norm") {
            grad = tp.all_reduce(&grad, ReduceOp::Sum)?;
        }
        all.push((name.to_string(), grad));
    }
    Ok(all)
}

/// The part of a tensor that this rank has: three of the six query heads, one of the two others, half of the MLP.
fn of_rank(rank: usize, all: &Tensor, like: &Tensor) -> Result<Tensor> {
    let mut dims = like.dims().iter().enumerate();
    dims.try_fold(all.clone(), |part, (dim, &mine)| match part.dim(dim)? {
        whole if mine < whole => part.narrow(dim, rank * mine, mine),
        _ => Ok(part),
    })
}

/// The L2 norm of what two tensors differ by.
fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    let difference = (a.to_dtype(DType::F64)? - b)?;
    difference.sqr()?.sum_all()?.sqrt()?.to_scalar()
}

/// How much f32 may be off differs from gradient to gradient, and from rank to rank: of two ranks the first has the small part of a
/// bias's gradient, a ninth of the whole, with as large errors. So the bound is what the reference is off by when its values on the way
/// are off by as much as f32 rounds them.
#[test]
fn a_decoder_layer_in_a_graph_has_the_gradients_of_plain_candle() {
    let make = |(seed, (name, shape)): (usize, (&'static str, Vec<usize>))| {
        let values = values(seed, &shape)?;
        Ok((name, Var::from_tensor(&values)?))
    };
    let weights: Vec<(&str, Var)> = shapes()
        .into_iter()
        .enumerate()
        .map(make)
        .collect::<Result<_>>()
        .unwrap();
    let x = Var::from_tensor(&values(20, &[B, T, 24]).unwrap()).unwrap();
    let dy = values(21, &[B, T, 24]).unwrap();
    let reference = |size: f64, draw: usize| {
        let seed = Cell::new(100 * (draw + 1));
        reference(&weights, &x, &dy, &Errors { size, seed }).unwrap()
    };
    let want = reference(0.0, 0);
    let choice = ProductChoice::from_env().unwrap();
    let of_factors = choice.unwrap_or(ProductChoice::Fma).f32_error();
    let size = of_factors + f64::from(f32::EPSILON) / 2.0 * LONGEST_SUM.sqrt();
    let draws: Vec<_> = (0..NUM_DRAWS).map(|draw| reference(size, draw)).collect();
    for tp in [1, 2] {
        threads(tp, |group| {
            let got = ours(&group, &weights, x.as_tensor(), &dy)?;
            for (i, (name, got)) in got.iter().enumerate() {
                let mine = |all: &[(String, Tensor)]| of_rank(group.rank(), &all[i].1, got);
                let want = mine(&want)?;
                let mut bound = 0f64;
                for draw in &draws {
                    bound = bound.max(distance(&mine(draw)?, &want)?);
                }
                let error = distance(got, &want)?;
                assert!(error <= bound, "tp {tp}, {name}: {error:e} of {bound:e}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// The environment decides for a whole process, so each way has one.
#[test]
fn in_each_way_of_multiplying() {
    let possible = ProductChoice::ALL.into_iter();
    for choice in possible.filter(|choice| choice.is_possible()) {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "in_graph::a_decoder_layer_in_a_graph_has_the_gradients_of_plain_candle",
            ])
            .env("CANDLE_TRAIN_PRODUCTS", choice.to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains("test result: ok. 1 passed"),
            "{choice}: {said}"
        );
    }
}
