//! Accuracy: 1e-6 relative L2, forward and gradients.

use crate::check::{assert_close, doubles, grads, random, random_var};
use candle_core::{Result, Tensor};
use candle_ops::rms_norm;

const EPS: f64 = 1e-5;

fn forward(x: &[f64], w: &[f64]) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter()
            .zip(w)
            .map(|(x, w)| x / (mean + EPS).sqrt() * w)
            .collect()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

fn backward(x: &[f64], w: &[f64], dy: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let h = w.len();
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; h]);
    for row in 0..x.len() / h {
        let (x, dy) = (&x[row * h..][..h], &dy[row * h..][..h]);
        let mean = x.iter().map(|x| x * x).sum::<f64>() / h as f64;
        let r = 1.0 / (mean + EPS).sqrt();
        let dr: f64 = (0..h).map(|i| dy[i] * w[i] * x[i]).sum();
        for i in 0..h {
            // y = x r w; dr/dx_i = -r^3 x_i / h.
            dx[row * h + i] = dy[i] * w[i] * r - dr * r.powi(3) * x[i] / h as f64;
            dw[i] += dy[i] * x[i] * r;
        }
    }
    (dx, dw)
}

#[test]
fn matches_the_reference() -> Result<()> {
    for (rows, h) in [(1, 1), (3, 5), (127, 48), (300, 64), (5, 4099), (2000, 16)] {
        let (x, w) = (random_var(1, (rows, h))?, random_var(2, h)?);
        let dy = random(3, (rows, h))?;
        let y = rms_norm(&x, &w, EPS)?;
        let (x64, w64) = (doubles(&x)?, doubles(&w)?);
        assert_close("y", &y, &forward(&x64, &w64), 1e-6);
        let [dx, dw] = grads(&y, &dy, [&x, &w])?;
        let (want_dx, want_dw) = backward(&x64, &w64, &doubles(&dy)?);
        if h == 1 {
            // A difference of almost equal numbers, dy w r and another: f32 is exact to a part of these, not of the rest.
            let r = 1.0 / (x64[0] * x64[0] + EPS).sqrt();
            let term = (doubles(&dy)?[0] * w64[0] * r).abs();
            let error = (doubles(&dx)?[0] - want_dx[0]).abs();
            assert!(
                error <= 1e-6 * term,
                "dx of one element: {error:e} of {term:e}"
            );
        } else {
            assert_close(&format!("dx {rows}x{h}"), &dx, &want_dx, 1e-6);
        }
        assert_close(&format!("dw {rows}x{h}"), &dw, &want_dw, 1e-6);
    }
    Ok(())
}

#[test]
fn reference_matches_finite_differences() -> Result<()> {
    let (x, w, dy) = (random(1, (3, 7))?, random(2, 7)?, random(3, (3, 7))?);
    let (mut x, mut w, dy) = (doubles(&x)?, doubles(&w)?, doubles(&dy)?);
    let loss =
        |x: &[f64], w: &[f64]| -> f64 { forward(x, w).iter().zip(&dy).map(|(y, dy)| y * dy).sum() };
    let (dx, dw) = backward(&x, &w, &dy);
    const STEP: f64 = 1e-6;
    for i in 0..x.len() {
        let at = x[i];
        let [plus, minus] = [at + STEP, at - STEP].map(|value| {
            x[i] = value;
            loss(&x, &w)
        });
        x[i] = at;
        assert!(((plus - minus) / (2.0 * STEP) - dx[i]).abs() < 1e-8);
    }
    for i in 0..w.len() {
        let at = w[i];
        let [plus, minus] = [at + STEP, at - STEP].map(|value| {
            w[i] = value;
            loss(&x, &w)
        });
        w[i] = at;
        assert!(((plus - minus) / (2.0 * STEP) - dw[i]).abs() < 1e-8);
    }
    Ok(())
}

#[test]
fn reads_views_that_are_not_contiguous() -> Result<()> {
    let (x, w) = (random_var(1, (7, 2, 5))?, random_var(2, 7)?);
    let view = x.as_tensor().permute((1, 2, 0))?;
    let y = rms_norm(&view, &w, EPS)?;
    let (copied, w64): (Tensor, _) = (view.contiguous()?, doubles(&w)?);
    assert_eq!(y.dims(), &[2, 5, 7]);
    assert_close("y", &y, &forward(&doubles(&copied)?, &w64), 1e-6);
    let dy = random(3, (2, 5, 7))?;
    let [dx, _] = grads(&y, &dy, [&x, &w])?;
    let (want, _) = backward(&doubles(&copied)?, &w64, &doubles(&dy)?);
    assert_close("dx", &dx.permute((1, 2, 0))?, &want, 1e-6);
    Ok(())
}
