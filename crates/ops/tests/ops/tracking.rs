//! Untracked inputs make no graph; what is frozen gets no gradient.

use crate::check::{device, on_each_device, random, random_var};
use candle_core::{Result, Tensor};
use candle_ops::{
    AttentionSpec, HeadGroups, causal_attention, cross_entropy, embedding, linear, rms_norm, rope,
    swiglu,
};

#[test]
fn untracked_inputs_make_no_graph() -> Result<()> {
    on_each_device(|| {
        let (x, w, heads) = (random(1, (3, 4))?, random(2, 4)?, random(3, (1, 3, 2, 4))?);
        let (table, ids) = (random(4, (3, 2))?, Tensor::new(&[0u32, 1, 2], &device())?);
        let outputs = [
            rms_norm(&x, &w, 1e-6)?,
            swiglu(&x, &x)?,
            rope(&heads, &table, &table)?,
            causal_attention(
                &heads,
                &heads,
                &heads,
                &AttentionSpec::new(1.0, HeadGroups::new(1)),
            )?,
            linear(&x, &x, Some(&random(5, 3)?))?,
            cross_entropy(&x, &ids)?,
            embedding(&x, &ids)?,
        ];
        for (i, output) in outputs.iter().enumerate() {
            assert!(!output.track_op(), "operation {i} made a graph");
        }
        Ok(())
    })
}

#[test]
fn frozen_weights_get_no_gradient() -> Result<()> {
    on_each_device(|| {
        let (x, w) = (random_var(1, (3, 4))?, random(2, 4)?);
        let grads = rms_norm(&x, &w, 1e-6)?.backward()?;
        assert!(grads.get(&x).is_some() && grads.get(&w).is_none());

        let (frozen, bias) = (random(3, (5, 4))?, random(4, 5)?);
        let grads = linear(&x, &frozen, Some(&bias))?.backward()?;
        assert!(grads.get(&x).is_some());
        assert!(grads.get(&frozen).is_none() && grads.get(&bias).is_none());

        let weight = random_var(3, (5, 4))?;
        let input = random(1, (3, 4))?;
        let grads = linear(&input, &weight, None)?.backward()?;
        assert!(grads.get(&weight).is_some() && grads.get(&input).is_none());

        let up = random(5, (3, 4))?;
        let grads = swiglu(&x, &up)?.backward()?;
        assert!(grads.get(&x).is_some() && grads.get(&up).is_none());

        let (q, kv) = (random_var(6, (1, 3, 2, 4))?, random(7, (1, 3, 2, 4))?);
        let grads = causal_attention(&q, &kv, &kv, &AttentionSpec::new(1.0, HeadGroups::new(1)))?
            .backward()?;
        assert!(grads.get(&q).is_some() && grads.get(&kv).is_none());
        Ok(())
    })
}

#[test]
fn one_tensor_in_two_roles_gets_both_gradients() -> Result<()> {
    on_each_device(|| {
        let x = random_var(1, (1, 5, 2, 4))?;
        let out = causal_attention(&x, &x, &x, &AttentionSpec::new(0.5, HeadGroups::new(1)))?;
        let together = out.backward()?;
        let (q, k, v) = (x.copy()?, x.copy()?, x.copy()?);
        let [q, k, v] = [q, k, v].map(|t| candle_core::Var::from_tensor(&t.detach()));
        let (q, k, v) = (q?, k?, v?);
        let apart = causal_attention(&q, &k, &v, &AttentionSpec::new(0.5, HeadGroups::new(1)))?
            .backward()?;
        let sum = [&q, &k, &v].map(|t| apart.get(t).expect("a gradient"));
        let sum = ((sum[0] + sum[1])? + sum[2])?;
        let difference = (together.get(&x).expect("a gradient") - sum)?
            .abs()?
            .max_all()?;
        assert!(difference.to_scalar::<f32>()? < 1e-6);
        Ok(())
    })
}
