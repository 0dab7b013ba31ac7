//! The pieces outside the graph: equal to the differentiable operations, which are tested against f64 loops, and to
//! plain sums of them.

use crate::attention_reference::both_passes;
use crate::check::{
    assert_close, assert_same_bits, check_into, device, doubles, floats, grads, on_each_device,
    random, random_ids, random_var,
};
use candle_core::{Result, Tensor};
use candle_ops::{
    AttentionSpec, HeadGroups, IGNORE_INDEX, RopeDirection, causal_attention, cross_entropy_grad,
    cross_entropy_grad_in_place, embedding, embedding_forward, embedding_grad_into, layer_norm,
    layer_norm_backward, layer_norm_forward, linear_forward_add, linear_input_grad_sum,
    linear_weight_grad_into, rms_norm, rms_norm_backward, rms_norm_forward, rope, rope_in_place,
    swiglu, swiglu_backward, swiglu_backward_and_output, swiglu_forward,
};

fn sum(a: &Tensor, b: &Tensor) -> Result<Vec<f64>> {
    Ok(doubles(a)?
        .iter()
        .zip(doubles(b)?)
        .map(|(a, b)| a + b)
        .collect())
}

#[test]
fn row_pieces_equal_the_operations() -> Result<()> {
    on_each_device(|| {
        for shape in [(1, 1, 5), (2, 127, 33), (3, 40, 512)] {
            let (x, dy, w) = (
                random_var(1, shape)?,
                random(2, shape)?,
                random_var(3, shape.2)?,
            );
            let y = rms_norm(&x, &w, 1e-5)?;
            let [dx, dw] = grads(&y, &dy, [&x, &w])?;
            let residual = random(4, shape)?;
            assert_eq!(floats(&rms_norm_forward(&x, &w, 1e-5)?)?, floats(&y)?);
            let (got, got_dw) = rms_norm_backward(&x, &w, &dy, 1e-5, Some(&residual), true)?;
            assert_close("dx + residual", &got, &sum(&dx, &residual)?, 1e-6);
            assert_eq!(floats(&got_dw.expect("dweight"))?, floats(&dw)?);
            let (got, none) = rms_norm_backward(&x, &w, &dy, 1e-5, None, false)?;
            assert_eq!(floats(&got)?, floats(&dx)?);
            assert!(none.is_none() && !got.track_op());

            let b = random_var(6, shape.2)?;
            let y = layer_norm(&x, &w, Some(&b), 1e-5)?;
            let [dx, dw, db] = grads(&y, &dy, [&x, &w, &b])?;
            let forward = layer_norm_forward(&x, &w, Some(&b), 1e-5)?;
            assert_eq!(floats(&forward)?, floats(&y)?);
            let back = |residual, wanted| layer_norm_backward(&x, &w, &dy, 1e-5, residual, wanted);
            let (got, [got_dw, got_db]) = back(Some(&residual), [true; 2])?;
            assert_close("dx + residual", &got, &sum(&dx, &residual)?, 1e-6);
            assert_eq!(floats(&got_dw.expect("dweight"))?, floats(&dw)?);
            assert_eq!(floats(&got_db.expect("dbias"))?, floats(&db)?);
            let (got, none) = back(None, [false; 2])?;
            assert_eq!(floats(&got)?, floats(&dx)?);
            assert!(none.iter().all(Option::is_none) && !got.track_op());

            let up = random_var(5, shape)?;
            let y = swiglu(&x, &up)?;
            let [dg, du] = grads(&y, &dy, [&x, &up])?;
            assert_eq!(floats(&swiglu_forward(&x, &up)?)?, floats(&y)?);
            let (again_dg, again_du, again_y) = swiglu_backward_and_output(&x, &up, &dy)?;
            assert_eq!(floats(&again_y)?, floats(&y)?);
            let (got_dg, got_du) = swiglu_backward(&x, &up, &dy)?;
            assert_eq!(floats(&again_dg)?, floats(&got_dg)?);
            assert_eq!(floats(&again_du)?, floats(&got_du)?);
            assert_eq!(
                (floats(&got_dg)?, floats(&got_du)?),
                (floats(&dg)?, floats(&du)?)
            );
        }
        Ok(())
    })
}

#[test]
fn rope_in_place_turns_the_storage_it_is_given() -> Result<()> {
    on_each_device(|| {
        let (x, dy) = (random_var(1, (2, 7, 3, 10))?, random(2, (2, 7, 3, 10))?);
        let angles = random(3, (7, 5))?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let y = rope(&x, &cos, &sin)?;
        let [dx] = grads(&y, &dy, [&x])?;
        let owned = x.copy()?.detach();
        let turned = rope_in_place(owned.clone(), &cos, &sin, RopeDirection::Forward)?;
        assert_eq!(floats(&turned)?, floats(&y)?);
        assert_eq!(floats(&owned)?, floats(&y)?);
        let back = rope_in_place(dy.copy()?, &cos, &sin, RopeDirection::Backward)?;
        assert_eq!(floats(&back)?, floats(&dx)?);
        // A table for each sequence.
        let tables = [&cos, &sin].map(|table| Tensor::stack(&[table, &(table * 0.5)?], 0));
        let ([x0, x1], [cos2, sin2]) = ([x.narrow(0, 0, 1)?, x.narrow(0, 1, 1)?], tables);
        let (half_cos, half_sin) = ((&cos * 0.5)?, (&sin * 0.5)?);
        let each = [rope(&x0, &cos, &sin)?, rope(&x1, &half_cos, &half_sin)?];
        let both = rope(&x, &cos2?, &sin2?)?;
        assert_eq!(floats(&both)?, floats(&Tensor::cat(&each, 0)?)?);
        // A view with gaps is copied and stays as it was.
        let view = dy.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
        let back = rope_in_place(view.clone(), &cos, &sin, RopeDirection::Backward)?;
        assert_eq!(floats(&back)?, floats(&dx)?);
        assert_eq!(floats(&view)?, floats(&dy)?);
        Ok(())
    })
}

#[test]
fn attention_pieces_equal_the_operation() -> Result<()> {
    on_each_device(|| {
        for (b, t, hq, hkv, d) in [(1, 1, 2, 1, 16), (1, 200, 4, 1, 48), (2, 130, 3, 3, 16)] {
            let q = random_var(1, (b, t, hq, d))?;
            let (k, v) = (
                random_var(2, (b, t, hkv, d))?,
                random_var(3, (b, t, hkv, d))?,
            );
            let (grad, groups) = (random(4, q.shape())?, HeadGroups::new(hq / hkv));
            let spec = AttentionSpec::new(0.3, groups);
            let want = causal_attention(&q, &k, &v, &spec)?;
            let want_grads = grads(&want, &grad, [&q, &k, &v])?;
            let [out, lse, dq, dk, dv] = both_passes([&q, &k, &v, &grad], &spec)?;
            assert_eq!(lse.dims(), &[b, hq, t]);
            assert_eq!(floats(&out)?, floats(&want)?);
            for (got, want) in [dq, dk, dv].iter().zip(&want_grads) {
                assert_eq!(floats(got)?, floats(want)?);
            }
            // The first position sees itself only.
            let first = (q.narrow(1, 0, 1)? * k.narrow(1, 0, 1)?.repeat((1, 1, hq / hkv, 1))?)?;
            let score = (first.sum(3)?.squeeze(1)? * 0.3)?;
            if hkv == 1 || hq == hkv {
                assert_close("lse", &lse.narrow(2, 0, 1)?, &doubles(&score)?, 1e-6);
            }
        }
        Ok(())
    })
}

#[test]
fn vocabulary_pieces_equal_the_operations() -> Result<()> {
    on_each_device(|| {
        for (v, h, t) in [(1, 3, 1), (97, 48, 127), (3001, 16, 500)] {
            let mut ids = random_ids(2, t, v as u32);
            ids.iter_mut()
                .skip(1)
                .step_by(7)
                .for_each(|id| *id = u32::MAX);
            let (weight, ids) = (random_var(1, (v, h))?, Tensor::new(ids, &device())?);
            let (y, dy) = (embedding(&weight, &ids)?, random(3, (t, h))?);
            let [dw] = grads(&y, &dy, [&weight])?;
            assert_eq!(floats(&embedding_forward(&weight, &ids)?)?, floats(&y)?);
            let write = |dst: &Tensor, add| embedding_grad_into(dst, add, &ids, &dy);
            check_into("embedding", &doubles(&dw)?, 1e-6, write)?;
        }
        let (n, v) = (13, 97);
        let mut ids = random_ids(3, n, 2 * v as u32);
        ids[4] = IGNORE_INDEX;
        let (logits, ids) = (random(1, (n, v))?, Tensor::new(ids, &device())?);
        let (lse, grad) = (random(2, n)?, Tensor::full(0.25f32, n, &device())?);
        let want = cross_entropy_grad(&logits, &lse, &ids, 40, &grad)?;
        let owned = logits.copy()?;
        let got = cross_entropy_grad_in_place(owned.clone(), &lse, &ids, 40, 0.25)?;
        assert_eq!(floats(&got)?, floats(&want)?);
        assert_eq!(floats(&owned)?, floats(&want)?);
        assert!(floats(&got.get(4)?)?.iter().all(|x| *x == 0.0));
        Ok(())
    })
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() -> Result<()> {
    on_each_device(|| {
        let (x, w) = (random(1, (1, 1009, 131))?, random(2, (257, 131))?);
        let (dy, ids) = (
            random(3, (1, 1009, 257))?,
            Tensor::new(random_ids(4, 1009, 500), &device())?,
        );
        let buffer = |len: usize, write: &dyn Fn(&Tensor) -> Result<()>| -> Result<Tensor> {
            let dst = Tensor::full(0.5f32, len, &device())?;
            write(&dst)?;
            Ok(dst)
        };
        let ids = ids.reshape((1, 1009))?;
        assert_same_bits("linear pieces", || {
            let add = |dst: &Tensor| linear_weight_grad_into(dst, true, &dy, &x);
            let scatter = |dst: &Tensor| embedding_grad_into(dst, true, &ids, &dy);
            Ok(vec![
                linear_forward_add(&dy, &x, &w)?,
                linear_input_grad_sum(&[(&dy, &w), (&dy, &w)])?,
                buffer(257 * 131, &add)?,
                buffer(500 * 257, &scatter)?,
            ])
        })
    })
}
