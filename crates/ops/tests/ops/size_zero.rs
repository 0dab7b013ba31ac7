//! Tensors without elements pass through forward and backward. (In candle's graph on the CPU only: candle itself allocates
//! nothing for them, which GPUs refuse.)

use crate::attention_reference::both_passes;
use crate::check::{device, floats, grads, on_each_device, placed, random, random_var};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    AttentionSpec, HeadGroups, RopeDirection, causal_attention, cross_entropy, cross_entropy_grad,
    embedding, embedding_forward, embedding_grad_into, layer_norm, layer_norm_backward,
    layer_norm_forward, linear, linear_bias_grad, linear_forward, linear_forward_add,
    linear_input_grad, linear_weight_grad, linear_weight_grad_into, rms_norm, rms_norm_backward,
    rms_norm_forward, rope, rope_in_place, softmax_stats, swiglu, swiglu_backward,
    swiglu_backward_and_output, swiglu_forward,
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
        let b = random_var(3, h)?;
        let y = layer_norm(&x, &w, Some(&b), 1e-6)?;
        check(y, &[n, h], [&x, &w, &b])?;
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
        (2, 0, 4, 2, 4),
        (2, 3, 0, 0, 4),
        (2, 40, 2, 1, 0),
    ] {
        let (q, k) = (
            random_var(1, (b, t, hq, d))?,
            random_var(2, (b, t, hkv, d))?,
        );
        let v = random_var(3, (b, t, hkv, d))?;
        for window in [None, Some(2)] {
            let spec = AttentionSpec {
                window,
                ..AttentionSpec::new(1.0, HeadGroups::new(2))
            };
            let out = causal_attention(&q, &k, &v, &spec)?;
            check(out, &[b, t, hq, d], [&q, &k, &v])?;
        }
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
    let stats = floats(&softmax_stats(&shard, &ids, 4)?)?;
    assert_eq!(stats, [f32::MIN, 0.0, 0.0].repeat(2));
    for (v, h, t) in [(0, 4, 2), (3, 0, 2), (3, 4, 0)] {
        let table = random_var(1, (v, h))?;
        let ids = Tensor::full(u32::MAX, (1, t), &Device::Cpu)?;
        check(embedding(&table, &ids)?, &[1, t, h], [&table])?;
    }
    Ok(())
}

#[test]
fn pieces() -> Result<()> {
    on_each_device(|| {
        for (n, h) in [(0, 5), (3, 0), (0, 0)] {
            let (x, w) = (random(1, (n, h))?, random(2, h)?);
            assert_eq!(rms_norm_forward(&x, &w, 1e-6)?.dims(), x.dims());
            let (dx, dw) = rms_norm_backward(&x, &w, &x, 1e-6, Some(&x), true)?;
            assert_eq!(dx.dims(), x.dims());
            assert_eq!(floats(&dw.expect("dw"))?, vec![0.0; h]);
            let y = layer_norm_forward(&x, &w, Some(&w), 1e-6)?;
            assert_eq!(y.dims(), x.dims());
            let (dx, sums) = layer_norm_backward(&x, &w, &x, 1e-6, Some(&x), [true; 2])?;
            assert_eq!(dx.dims(), x.dims());
            for sum in sums {
                assert_eq!(floats(&sum.expect("dw and db"))?, vec![0.0; h]);
            }
            assert_eq!(swiglu_forward(&x, &x)?.dims(), x.dims());
            assert_eq!(swiglu_backward(&x, &x, &x)?.1.dims(), x.dims());
            assert_eq!(swiglu_backward_and_output(&x, &x, &x)?.2.dims(), x.dims());
        }
        for dims in [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)] {
            let (x, table) = (random(1, dims)?, random(2, (dims.1, dims.3 / 2))?);
            let turned = rope_in_place(x.clone(), &table, &table, RopeDirection::Forward)?;
            assert_eq!(turned.dims(), x.dims());
        }
        for (n, num_in, num_out) in [(0, 4, 5), (3, 0, 5), (3, 4, 0)] {
            let (x, w) = (random(1, (n, num_in))?, random(2, (num_out, num_in))?);
            let (dy, bias) = (random(3, (n, num_out))?, random(4, num_out)?);
            let y = linear_forward(&x, &w, None)?;
            assert_eq!((y.dims(), floats(&y)?), (dy.dims(), vec![0.0; n * num_out]));
            let rows = floats(&bias)?.repeat(n);
            assert_eq!(floats(&linear_forward(&x, &w, Some(&bias))?)?, rows);
            assert_eq!(floats(&linear_forward_add(&dy, &x, &w)?)?, floats(&dy)?);
            let dx = linear_input_grad(&dy, &w)?;
            assert_eq!((dx.dims(), floats(&dx)?), (x.dims(), vec![0.0; n * num_in]));
            let dw = linear_weight_grad(&dy, &x)?;
            assert_eq!(floats(&dw)?, vec![0.0; num_out * num_in]);
            linear_weight_grad_into(&dw, true, &dy, &x)?;
            linear_weight_grad_into(&dw, false, &dy, &x)?;
            assert_eq!(floats(&dw)?, vec![0.0; num_out * num_in]);
            let db = linear_bias_grad(&random(5, (0, num_out))?)?;
            assert_eq!(floats(&db)?, vec![0.0; num_out]);
        }
        Ok(())
    })
}

#[test]
fn pieces_with_ids_and_heads() -> Result<()> {
    on_each_device(|| {
        for (b, t, hq, hkv, d) in [
            (0, 3, 2, 1, 4),
            (2, 0, 2, 1, 4),
            (2, 0, 4, 2, 4),
            (2, 3, 0, 0, 4),
            (2, 3, 0, 1, 4),
            (2, 40, 2, 1, 0),
        ] {
            let (q, k) = (random(1, (b, t, hq, d))?, random(2, (b, t, hkv, d))?);
            let spec = AttentionSpec {
                window: Some(2),
                ..AttentionSpec::new(1.0, HeadGroups::new(2))
            };
            let [out, log_sum_exp, dq, dk, dv] = both_passes([&q, &k, &k, &q], &spec)?;
            assert_eq!(
                (out.dims(), log_sum_exp.dims()),
                (q.dims(), &[b, hq, t][..])
            );
            assert_eq!(dq.dims(), q.dims());
            for grad in [dk, dv] {
                assert_eq!(floats(&grad)?, vec![0.0; k.elem_count()]);
            }
        }
        let (shard, ids) = (random(1, (2, 0))?, Tensor::new(&[4u32, 5], &device())?);
        let stats = floats(&softmax_stats(&shard, &ids, 4)?)?;
        assert_eq!(stats, [f32::MIN, 0.0, 0.0].repeat(2));
        let row = random(2, 2)?;
        let grad = cross_entropy_grad(&shard, &row, &ids, 4, &row)?;
        assert_eq!(grad.dims(), [2, 0]);
        for (v, h, t) in [(0, 4, 2), (3, 0, 2), (3, 4, 0)] {
            let (table, dy) = (random(1, (v, h))?, random(2, (1, t, h))?);
            let ids = placed(&Tensor::full(u32::MAX, (1, t), &Device::Cpu)?)?;
            let y = embedding_forward(&table, &ids)?;
            assert_eq!((y.dims(), floats(&y)?), (dy.dims(), vec![0.0; t * h]));
            let dst = random(3, v * h)?;
            embedding_grad_into(&dst, false, &ids, &dy)?;
            assert_eq!(floats(&dst)?, vec![0.0; v * h]);
        }
        Ok(())
    })
}
