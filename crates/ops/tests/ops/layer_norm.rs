//! Forward and gradients to the rounding errors of f32.

use crate::check::{
    assert_close, assert_slopes, device, doubles, floats, grads, in_dtype, lane_roundings,
    on_each_device, on_each_device_in_each_type, random, random_var, random_var_in, rounding_error,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_ops::{layer_norm, layer_norm_backward};

const EPS: f64 = 1e-5;

/// Each value less the mean, and the inverse of the standard deviation.
fn centred(x: &[f64]) -> (Vec<f64>, f64) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let centred: Vec<f64> = x.iter().map(|x| x - mean).collect();
    let variance = centred.iter().map(|c| c * c).sum::<f64>() / x.len() as f64;
    (centred, 1.0 / (variance + EPS).sqrt())
}

fn forward(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        let (c, r) = centred(x);
        (0..c.len()).map(|i| c[i] * r * w[i] + b[i]).collect()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

/// dx, dw and db.
fn backward(x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let h = w.len();
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; h], vec![0.0; h]);
    for row in 0..x.len() / h {
        let ((c, r), dy) = (centred(&x[row * h..][..h]), &dy[row * h..][..h]);
        let dmean: f64 = (0..h).map(|j| dy[j] * w[j] * r).sum();
        let dr: f64 = (0..h).map(|j| dy[j] * w[j] * c[j]).sum();
        for i in 0..h {
            // y = c r w + b; dc_j/dx_i = (i = j) - 1 / h, dr/dx_i = -r^3 c_i / h.
            dx[row * h + i] = dy[i] * w[i] * r - (dmean + dr * r.powi(3) * c[i]) / h as f64;
            dw[i] += dy[i] * c[i] * r;
            db[i] += dy[i];
        }
    }
    [dx, dw, db]
}

/// Rows of the numbers and odd widths, rows of every remainder of a vector, more rows than one partial sum takes.
const SHAPES: [(usize, usize); 9] = [
    (1, 33),
    (1, 64),
    (2, 97),
    (3, 48),
    (127, 515),
    (300, 64),
    (1000, 47),
    (5, 4099),
    (2000, 17),
];

/// A sum for the mean, one for what is left of it, one for the variance, and the root, quotients and products.
fn y_bound(h: usize) -> f64 {
    rounding_error(2 * lane_roundings(h) + 8)
}

#[test]
fn matches_the_reference() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for (rows, h) in SHAPES {
            let x = random_var_in(dtype, 1, (rows, h))?;
            let (w, b) = (random_var_in(dtype, 2, h)?, random_var_in(dtype, 5, h)?);
            let [dy, residual] = [3, 4].map(|seed| in_dtype(&random(seed, (rows, h))?, dtype));
            let (dy, residual) = (dy?, residual?);
            let (x64, w64) = (doubles(&x)?, doubles(&w)?);
            let what = |name: &str| format!("{name} {rows}x{h} {dtype:?}");
            let plain = layer_norm(&x, &w, None, EPS)?;
            let want = forward(&x64, &w64, &vec![0.0; h]);
            assert_close(&what("y without bias"), &plain, &want, y_bound(h));
            let y = layer_norm(&x, &w, Some(&b), EPS)?;
            let want = forward(&x64, &w64, &doubles(&b)?);
            assert_close(&what("y"), &y, &want, y_bound(h));
            let [dx, dw, db] = grads(&y, &dy, [&x, &w, &b])?;
            let [want_dx, want_dw, want_db] = backward(&x64, &w64, &doubles(&dy)?);
            // Two more sums over the row, and seven operations.
            let bound = rounding_error(4 * lane_roundings(h) + 15);
            assert_close(&what("dx"), &dx, &want_dx, bound);
            let both: Vec<f64> = want_dx
                .iter()
                .zip(doubles(&residual)?)
                .map(|(a, b)| a + b)
                .collect();
            let (got, _) = layer_norm_backward(&x, &w, &dy, EPS, Some(&residual), [false; 2])?;
            assert_close(&what("dx + residual"), &got, &both, bound);
            // Rows are added 16 at a time.
            let added = rows.min(16) + rows / 16;
            let bound = rounding_error(2 * lane_roundings(h) + 8 + added);
            assert_close(&what("dw"), &dw, &want_dw, bound);
            assert_close(&what("db"), &db, &want_db, rounding_error(added));
            let without_bias = grads(&plain, &dy, [&x, &w])?;
            assert_eq!(floats(&without_bias[0])?, floats(&dx)?);
            assert_eq!(floats(&without_bias[1])?, floats(&dw)?);
        }
        Ok(())
    })
}

/// The mean is a thousand times the standard deviation: f32 holds it to 3e-5 only, and each value to that.
#[test]
fn a_mean_far_from_zero_costs_no_accuracy() -> Result<()> {
    on_each_device(|| {
        for (rows, h) in [(3, 97), (2, 4099)] {
            let x = Var::from_tensor(&(random(1, (rows, h))? + 1000.3)?)?;
            let (w, b, dy) = (random_var(2, h)?, random_var(3, h)?, random(4, (rows, h))?);
            let y = layer_norm(&x, &w, Some(&b), EPS)?;
            let (x64, w64) = (doubles(&x)?, doubles(&w)?);
            let want = forward(&x64, &w64, &doubles(&b)?);
            assert_close("y", &y, &want, y_bound(h));
            let [dx, dw] = grads(&y, &dy, [&x, &w])?;
            let [want_dx, want_dw, _] = backward(&x64, &w64, &doubles(&dy)?);
            let bound = rounding_error(4 * lane_roundings(h) + 15);
            assert_close("dx", &dx, &want_dx, bound);
            assert_close("dw", &dw, &want_dw, bound);
        }
        Ok(())
    })
}

#[test]
fn a_row_of_equal_values_is_the_bias() -> Result<()> {
    on_each_device(|| {
        for (h, value) in [(1, 0.7), (515, 0.0), (515, 1e6 + 0.3)] {
            let x = Var::from_tensor(&(random(1, (2, h))?.zeros_like()? + value)?)?;
            let (w, b, dy) = (random(2, h)?, random(3, h)?, random(4, (2, h))?);
            let y = layer_norm(&x, &w, Some(&b), EPS)?;
            let want = doubles(&b)?.repeat(2);
            assert_close("y", &y, &want, rounding_error(1));
            let [dx] = grads(&y, &dy, [&x])?;
            let [want, _, _] = backward(&doubles(&x)?, &doubles(&w)?, &doubles(&dy)?);
            match h {
                1 => assert_eq!(floats(&dx)?, [0.0; 2]),
                _ => assert_close("dx", &dx, &want, rounding_error(lane_roundings(h) + 8)),
            }
        }
        Ok(())
    })
}

/// The mean of a long row is far off: what is then left of the variance is rounding, which must not pass as negative.
#[test]
fn long_rows_of_equal_values_stay_finite() -> Result<()> {
    on_each_device(|| {
        let (rows, h) = (10, 50_021);
        let values = (random(1, (rows, 1))? * 1e12)?;
        let x = values.broadcast_as((rows, h))?.contiguous()?;
        let y = layer_norm(&x, &Tensor::ones(h, DType::F32, &device())?, None, 1e-12)?;
        assert!(floats(&y)?.iter().all(|y| y.is_finite()));
        Ok(())
    })
}

#[test]
fn what_is_frozen_gets_no_gradient_and_changes_no_other() -> Result<()> {
    on_each_device(|| {
        let vars = [
            random_var(1, (7, 33))?,
            random_var(2, 33)?,
            random_var(3, 33)?,
        ];
        let dy = random(4, (7, 33))?;
        let [x, w, b] = &vars;
        let all = grads(&layer_norm(x, w, Some(b), EPS)?, &dy, [x, w, b])?;
        for tracked in 1..8 {
            let is_tracked = |i: usize| tracked >> i & 1 == 1;
            let input = |i: usize| match is_tracked(i) {
                true => vars[i].as_tensor().clone(),
                false => vars[i].as_detached_tensor(),
            };
            let y = layer_norm(&input(0), &input(1), Some(&input(2)), EPS)?;
            let store = (y * &dy)?.sum_all()?.backward()?;
            for (i, var) in vars.iter().enumerate() {
                let got = store.get(var).map(floats).transpose()?;
                let want = is_tracked(i).then(|| floats(&all[i])).transpose()?;
                assert!(got == want, "input {i} of those tracked {tracked:03b}");
            }
        }
        let frozen = layer_norm(&dy, &w.as_detached_tensor(), None, EPS)?;
        assert!(!frozen.track_op());
        Ok(())
    })
}

#[test]
fn reference_matches_finite_differences() -> Result<()> {
    let (x, w, b, dy) = (
        random(1, (3, 7))?,
        random(2, 7)?,
        random(3, 7)?,
        random(4, (3, 7))?,
    );
    let dy = doubles(&dy)?;
    let inputs = [doubles(&x)?, doubles(&w)?, doubles(&b)?];
    let gradients = backward(&inputs[0], &inputs[1], &dy);
    assert_slopes(gradients, inputs, |[x, w, b]| {
        forward(x, w, b).iter().zip(&dy).map(|(y, dy)| y * dy).sum()
    });
    Ok(())
}

#[test]
fn reads_views_that_are_not_contiguous() -> Result<()> {
    on_each_device(|| {
        let (x, w, b) = (
            random_var(1, (17, 2, 5))?,
            random(2, (17, 2))?,
            random(3, 17)?,
        );
        let (view, w): (Tensor, _) = (x.as_tensor().permute((1, 2, 0))?, w.narrow(1, 1, 1)?);
        let w = w.squeeze(1)?;
        let y = layer_norm(&view, &w, Some(&b), EPS)?;
        assert_eq!(y.dims(), &[2, 5, 17]);
        let (x64, w64) = (doubles(&view.contiguous()?)?, doubles(&w)?);
        assert_close("y", &y, &forward(&x64, &w64, &doubles(&b)?), y_bound(17));
        let dy = random(3, (2, 5, 17))?;
        let [dx] = grads(&y, &dy, [&x])?;
        let [want, _, _] = backward(&x64, &w64, &doubles(&dy)?);
        let bound = rounding_error(4 * lane_roundings(17) + 15);
        assert_close("dx", &dx.permute((1, 2, 0))?, &want, bound);
        Ok(())
    })
}
