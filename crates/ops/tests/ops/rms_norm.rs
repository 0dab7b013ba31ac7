//! Forward and gradients to the rounding errors of f32.

use crate::check::{
    assert_close, assert_slopes, doubles, grads, in_dtype, lane_roundings, on_each_device,
    on_each_device_in_each_type, random, random_var, random_var_in, rounding_error,
};
use candle_core::{Result, Tensor};
use candle_ops::{rms_norm, rms_norm_backward};

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

/// Rows of the lengths, rows of every remainder of a vector, and more rows than one partial sum takes.
const SHAPES: [(usize, usize); 9] = [
    (1, 16),
    (1, 64),
    (2, 48),
    (3, 97),
    (127, 128),
    (300, 64),
    (1000, 48),
    (5, 4099),
    (2000, 16),
];

#[test]
fn matches_the_reference() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for (rows, h) in SHAPES {
            let x = random_var_in(dtype, 1, (rows, h))?;
            let w = random_var_in(dtype, 2, h)?;
            let [dy, residual] = [3, 4].map(|seed| in_dtype(&random(seed, (rows, h))?, dtype));
            let (dy, residual) = (dy?, residual?);
            let what = |name: &str| format!("{name} {rows}x{h} {dtype:?}");
            let y = rms_norm(&x, &w, EPS)?;
            let (x64, w64) = (doubles(&x)?, doubles(&w)?);
            // The inverse root mean square, and two products.
            let bound = rounding_error(lane_roundings(h) + 4);
            assert_close(&what("y"), &y, &forward(&x64, &w64), bound);
            let [dx, dw] = grads(&y, &dy, [&x, &w])?;
            let (want_dx, want_dw) = backward(&x64, &w64, &doubles(&dy)?);
            // A second sum over the row, and five operations.
            let bound = rounding_error(2 * lane_roundings(h) + 8);
            assert_close(&what("dx"), &dx, &want_dx, bound);
            let both: Vec<f64> = want_dx
                .iter()
                .zip(doubles(&residual)?)
                .map(|(a, b)| a + b)
                .collect();
            let (dx, _) = rms_norm_backward(&x, &w, &dy, EPS, Some(&residual), false)?;
            assert_close(&what("dx + residual"), &dx, &both, bound);
            // Rows are added 16 at a time.
            let bound = rounding_error(lane_roundings(h) + 6 + rows.min(16) + rows / 16);
            assert_close(&what("dw"), &dw, &want_dw, bound);
        }
        Ok(())
    })
}

#[test]
fn a_row_of_one_element() -> Result<()> {
    on_each_device(|| {
        let (x, w, dy) = (
            random_var(1, (1, 1))?,
            random_var(2, 1)?,
            random(3, (1, 1))?,
        );
        let (x64, w64, dy64) = (doubles(&x)?, doubles(&w)?, doubles(&dy)?);
        let y = rms_norm(&x, &w, EPS)?;
        assert_close("y", &y, &forward(&x64, &w64), rounding_error(10));
        let [dx, dw] = grads(&y, &dy, [&x, &w])?;
        let (want_dx, want_dw) = backward(&x64, &w64, &dy64);
        assert_close("dw", &dw, &want_dw, rounding_error(10));
        // A difference of almost equal numbers, dy w r and another: f32 is exact to a part of these, not of the rest.
        let term = (dy64[0] * w64[0] / (x64[0] * x64[0] + EPS).sqrt()).abs();
        let error = (doubles(&dx)?[0] - want_dx[0]).abs();
        assert!(error <= rounding_error(20) * term, "{error:e} of {term:e}");
        Ok(())
    })
}

#[test]
fn reference_matches_finite_differences() -> Result<()> {
    let (x, w, dy) = (random(1, (3, 7))?, random(2, 7)?, random(3, (3, 7))?);
    let (x, w, dy) = (doubles(&x)?, doubles(&w)?, doubles(&dy)?);
    let (dx, dw) = backward(&x, &w, &dy);
    assert_slopes([dx, dw], [x, w], |[x, w]| {
        forward(x, w).iter().zip(&dy).map(|(y, dy)| y * dy).sum()
    });
    Ok(())
}

#[test]
fn reads_views_that_are_not_contiguous() -> Result<()> {
    on_each_device(|| {
        let (x, w) = (random_var(1, (7, 2, 5))?, random_var(2, 7)?);
        let view = x.as_tensor().permute((1, 2, 0))?;
        let y = rms_norm(&view, &w, EPS)?;
        let (copied, w64): (Tensor, _) = (view.contiguous()?, doubles(&w)?);
        assert_eq!(y.dims(), &[2, 5, 7]);
        let bound = rounding_error(2 * lane_roundings(7) + 8);
        assert_close("y", &y, &forward(&doubles(&copied)?, &w64), bound);
        let dy = random(3, (2, 5, 7))?;
        let [dx, _] = grads(&y, &dy, [&x, &w])?;
        let (want, _) = backward(&doubles(&copied)?, &w64, &doubles(&dy)?);
        assert_close("dx", &dx.permute((1, 2, 0))?, &want, bound);
        Ok(())
    })
}
