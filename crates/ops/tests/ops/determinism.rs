//! The same bits on one thread and on three, and in each run, for odd inputs large enough to be cut into chunks.

use crate::check::{
    assert_same_bits, at_most, device, grads, on_each_device, random, random_ids, random_var,
};
use candle_core::{Result, Tensor, Var};
use candle_ops::{
    AttentionSpec, HeadGroups, causal_attention, cross_entropy, embedding, layer_norm, linear,
    linear_bias_grad, rms_norm, rope, swiglu,
};

/// The value and the gradients.
fn value_and_grads<const N: usize>(y: Tensor, vars: [&Var; N]) -> Result<Vec<Tensor>> {
    let dy = random(99, y.shape())?;
    let grads = grads(&y, &dy, vars)?;
    Ok([vec![y], grads.to_vec()].concat())
}

#[test]
fn row_operations() -> Result<()> {
    on_each_device(|| {
        let (x, w) = (random_var(1, (1031, 515))?, random_var(2, 515)?);
        assert_same_bits("rms_norm", || {
            value_and_grads(rms_norm(&x, &w, 1e-6)?, [&x, &w])
        })?;
        let b = random_var(6, 515)?;
        assert_same_bits("layer_norm", || {
            value_and_grads(layer_norm(&x, &w, Some(&b), 1e-6)?, [&x, &w, &b])
        })?;
        let up = random_var(3, (1031, 515))?;
        assert_same_bits("swiglu", || value_and_grads(swiglu(&x, &up)?, [&x, &up]))?;
        let (heads, angles) = (random_var(4, (1, 1009, 5, 48))?, random(5, (1009, 24))?);
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        assert_same_bits("rope", || {
            value_and_grads(rope(&heads, &cos, &sin)?, [&heads])
        })
    })
}

#[test]
fn vocabulary_operations() -> Result<()> {
    on_each_device(|| {
        let logits = random_var(1, (127, 32001))?;
        let ids = Tensor::new(random_ids(2, 127, 32001), &device())?;
        assert_same_bits("cross_entropy", || {
            value_and_grads(cross_entropy(&logits, &ids)?, [&logits])
        })?;
        let table = random_var(3, (32001, 48))?;
        let ids = Tensor::from_vec(random_ids(4, 3027, 32001), (3, 1009), &device())?;
        assert_same_bits("embedding", || {
            value_and_grads(embedding(&table, &ids)?, [&table])
        })
    })
}

#[test]
fn matrix_operations() -> Result<()> {
    on_each_device(|| {
        let (x, w) = (random_var(1, (1, 1009, 131))?, random_var(2, (515, 131))?);
        let bias = random_var(3, 515)?;
        assert_same_bits("linear", || {
            value_and_grads(linear(&x, &w, Some(&bias))?, [&x, &w, &bias])
        })?;
        let dy = random(4, (5000, 33))?;
        assert_same_bits("linear_bias_grad", || Ok(vec![linear_bias_grad(&dy)?]))?;
        for (b, t, hq, hkv, d) in [(2, 127, 6, 2, 48), (1, 1009, 3, 1, 64)] {
            let t = at_most(260, t);
            let q = random_var(5, (b, t, hq, d))?;
            let (k, v) = (
                random_var(6, (b, t, hkv, d))?,
                random_var(7, (b, t, hkv, d))?,
            );
            for window in [None, Some(77)] {
                let spec = AttentionSpec {
                    window,
                    ..AttentionSpec::new(0.2, HeadGroups::new(hq / hkv))
                };
                assert_same_bits("causal_attention", || {
                    let out = causal_attention(&q, &k, &v, &spec)?;
                    value_and_grads(out, [&q, &k, &v])
                })?;
            }
        }
        Ok(())
    })
}
