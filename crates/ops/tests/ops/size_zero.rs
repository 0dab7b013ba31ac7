//! Tensors without elements pass through forward and backward.

use crate::check::{floats, grads, random, random_var};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    HeadGroups, causal_attention, cross_entropy, embedding, linear, linear_bias_grad, rms_norm,
    rope, row_max, sum_exp_and_target_logit, swiglu,
};

/// The gradients of `vars`, after a look at the shape of the value.
fn check<const N: usize>(y: Tensor, dims: &[usize], vars: [&Var; N]) -> Result<()> {
    assert_eq!(y.dims(), dims);
    let dy = y.ones_like()?.detach();
    for (grad, var) in grads(&y, &dy, vars)?.iter().zip(vars) {
        assert_eq!(grad.dims(), var.dims());
        assert!(floats(grad)?.iter().all(|x| *x == 0.0));
    }
    Ok(())
}

#[test]
fn row_operations() -> Result<()> {
    for (n, h) in [(0, 5), (3, 0), (0, 0)] {
        let (x, w) = (random_var(1, (n, h))?, random_var(2, h)?);
        check(rms_norm(&x, &w, 1e-6)?, &[n, h], [&x, &w])?;
        check(swiglu(&x, &x)?, &[n, h], [&x])?;
    }
    for dims in [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)] {
        let x = random_var(1, dims)?;
        let table = random(2, (dims.1, dims.3 / 2))?;
        check(rope(&x, &table, &table)?, x.dims(), [&x])?;
    }
    Ok(())
}

#[test]
fn matrix_operations() -> Result<()> {
    for (n, num_in, num_out) in [(0, 4, 5), (3, 0, 5), (3, 4, 0)] {
        let (x, w) = (
            random_var(1, (2, n, num_in))?,
            random_var(2, (num_out, num_in))?,
        );
        check(linear(&x, &w, None)?, &[2, n, num_out], [&x, &w])?;
        let dy = random(3, (2, n, num_out))?;
        assert_eq!(linear_bias_grad(&dy)?.dims(), &[num_out]);
    }
    for (b, t, hq, hkv, d) in [
        (0, 3, 2, 1, 4),
        (2, 0, 2, 1, 4),
        (2, 3, 0, 0, 4),
        (2, 3, 2, 1, 0),
    ] {
        let (q, k) = (
            random_var(1, (b, t, hq, d))?,
            random_var(2, (b, t, hkv, d))?,
        );
        let v = random_var(3, (b, t, hkv, d))?;
        let out = causal_attention(&q, &k, &v, 1.0, HeadGroups::new(2))?;
        check(out, &[b, t, hq, d], [&q, &k, &v])?;
    }
    Ok(())
}

#[test]
fn vocabulary_operations() -> Result<()> {
    let logits = random_var(1, (0, 7))?;
    check(
        cross_entropy(&logits, &Tensor::zeros(0, DType::U32, &Device::Cpu)?)?,
        &[0],
        [&logits],
    )?;
    let ids = Tensor::new(&[4u32, 5], &Device::Cpu)?;
    let shard = random(1, (2, 0))?;
    assert_eq!(floats(&row_max(&shard)?)?, [f32::NEG_INFINITY; 2]);
    let pieces = sum_exp_and_target_logit(&shard, &random(2, 2)?, &ids, 4)?;
    assert_eq!(floats(&pieces)?, [0.0; 4]);
    for (v, h, t) in [(0, 4, 2), (3, 0, 2), (3, 4, 0)] {
        let table = random_var(1, (v, h))?;
        let ids = Tensor::full(u32::MAX, (1, t), &Device::Cpu)?;
        check(embedding(&table, &ids)?, &[1, t, h], [&table])?;
    }
    Ok(())
}
