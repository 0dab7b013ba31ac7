//! Accuracy: 1e-6 relative L2, forward and gradients.

use crate::check::{assert_close, doubles, grads, random, random_var};
use candle_core::Result;
use candle_ops::{linear, linear_bias_grad, linear_forward, linear_input_grad, linear_weight_grad};

/// `a (m, k)` times `b (k, n)`.
fn product(a: &[f64], b: &[f64], (m, k, n): (usize, usize, usize)) -> Vec<f64> {
    let element = |i: usize| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum();
    (0..m * n).map(element).collect()
}

fn transpose(a: &[f64], cols: usize) -> Vec<f64> {
    (0..cols)
        .flat_map(|c| a.iter().skip(c).step_by(cols).copied())
        .collect()
}

#[test]
fn matches_the_reference_whole_and_in_pieces() -> Result<()> {
    for (b, t, num_in, num_out) in [
        (1, 1, 1, 1),
        (2, 1, 48, 97),
        (1, 127, 64, 33),
        (3, 100, 16, 300),
    ] {
        let (x, w) = (
            random_var(1, (b, t, num_in))?,
            random_var(2, (num_out, num_in))?,
        );
        let (bias, dy) = (random_var(3, num_out)?, random(4, (b, t, num_out))?);
        let n = b * t;
        let (x64, w64, dy64) = (doubles(&x)?, doubles(&w)?, doubles(&dy)?);
        let no_bias = product(&x64, &transpose(&w64, num_in), (n, num_in, num_out));
        let bias64 = doubles(&bias)?;
        let with_bias: Vec<f64> = no_bias
            .iter()
            .zip(bias64.iter().cycle())
            .map(|(y, b)| y + b)
            .collect();
        let want_dx = product(&dy64, &w64, (n, num_out, num_in));
        let want_dw = product(&transpose(&dy64, num_out), &x64, (num_out, n, num_in));
        let want_db = product(&vec![1.0; n], &dy64, (1, n, num_out));

        let y = linear(&x, &w, None)?;
        assert_eq!(y.dims(), &[b, t, num_out]);
        assert_close("y", &y, &no_bias, 1e-6);
        let [dx, dw] = grads(&y, &dy, [&x, &w])?;
        assert_close("dx", &dx, &want_dx, 1e-6);
        assert_close("dw", &dw, &want_dw, 1e-6);

        let y = linear(&x, &w, Some(&bias))?;
        assert_close("y with bias", &y, &with_bias, 1e-6);
        let [dx, dw, db] = grads(&y, &dy, [&x, &w, &bias])?;
        assert_close("dx with bias", &dx, &want_dx, 1e-6);
        assert_close("dw with bias", &dw, &want_dw, 1e-6);
        assert_close("db", &db, &want_db, 1e-6);

        let y = linear_forward(&x, &w, Some(&bias))?;
        assert!(!y.track_op());
        assert_close("linear_forward", &y, &with_bias, 1e-6);
        assert_close(
            "linear_input_grad",
            &linear_input_grad(&dy, &w)?,
            &want_dx,
            1e-6,
        );
        assert_close(
            "linear_weight_grad",
            &linear_weight_grad(&dy, &x)?,
            &want_dw,
            1e-6,
        );
        assert_close("linear_bias_grad", &linear_bias_grad(&dy)?, &want_db, 1e-6);
    }
    Ok(())
}

#[test]
fn reads_views_that_are_not_contiguous() -> Result<()> {
    let (x, w) = (random(1, (7, 5))?, random(2, (9, 3))?);
    let (x, w) = (x.t()?, w.t()?.narrow(1, 1, 7)?);
    let want = linear_forward(&x.contiguous()?, &w.contiguous()?, None)?;
    assert_close("y", &linear_forward(&x, &w, None)?, &doubles(&want)?, 0.0);
    Ok(())
}
