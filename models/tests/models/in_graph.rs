//! A decoder layer as a node of candle's graph, against the same layer in candle's own operations.

use std::sync::Arc;

use candle_comm::launch::threads;
use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops::softmax;
use candle_parallel::{Layer, ParamStore, in_graph};
use candle_train_models::{DecoderLayer, ModelConfig, RotaryTable};

const B: usize = 2;
const T: usize = 5;

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

/// Any values, about 1 in size, a function of their place.
fn values(seed: usize, dims: &[usize]) -> Result<Tensor> {
    let len: usize = dims.iter().product();
    let value = |i: usize| ((i * 37 + seed * 101) % 89) as f64 / 44.5 - 1.0;
    Tensor::from_iter((0..len).map(value), &Device::Cpu)?.reshape(dims)
}

/// The layer and its gradients in f64, by name; "x" is the input, "y" the output.
fn reference(weights: &[(&str, Var)], x: &Var, dy: &Tensor) -> Result<Vec<(String, Tensor)>> {
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
        match has_bias {
            true => y.broadcast_add(&w(&format!("{name}.bias"))),
            false => Ok(y),
        }
    };
    let norm = |x: &Tensor, name: &str| -> Result<Tensor> {
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + config.rms_norm_eps)?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(&w(name))
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
        Tensor::cat(&[first, second], 3)
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
    let scores = (q.matmul(&k.t()?.contiguous()?)? * 0.5)?.broadcast_add(&mask)?;
    let ys = softmax(&scores, D::Minus1)?.matmul(&v)?;
    let ys = ys.transpose(1, 2)?.reshape((B, T, 24))?;
    let middle = (x.as_tensor() + linear(&ys, "self_attn.o_proj", true)?)?;
    let normed = norm(&middle, "post_attention_layernorm.weight")?;
    let gate = linear(&normed, "mlp.gate_proj", false)?.silu()?;
    let product = (gate * linear(&normed, "mlp.up_proj", false)?)?;
    let y = (middle + linear(&product, "mlp.down_proj", false)?)?;
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
    let layer = DecoderLayer::new(&config, 0, rotary, tp, vb)?;
    // Plain operations before and after.
    let leaf = Var::from_tensor(&(x.to_dtype(DType::F32)? * 0.5)?)?;
    let y = in_graph(&layer, &(leaf.as_tensor() * 2.0)?)?;
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
    let want = reference(&weights, &x, &dy).unwrap();
    for tp in [1, 2] {
        threads(tp, |group| {
            let got = ours(&group, &weights, x.as_tensor(), &dy)?;
            for ((name, got), (_, want)) in got.iter().zip(&want) {
                // Three of the six query heads, one of the two others, half of the MLP.
                let mut want = want.clone();
                for dim in 0..want.rank() {
                    let (all, mine) = (want.dim(dim)?, got.dim(dim)?);
                    if mine < all {
                        want = want.narrow(dim, group.rank() * mine, mine)?;
                    }
                }
                let error = (got.to_dtype(DType::F64)? - &want)?
                    .sqr()?
                    .sum_all()?
                    .sqrt()?;
                let norm = want.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>()?;
                let error = error.to_scalar::<f64>()? / norm;
                assert!(error < 1e-5, "tp {tp}, {name}: {error}");
            }
            Ok(())
        })
        .unwrap();
    }
}
