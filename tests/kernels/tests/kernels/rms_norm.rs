//! RMSNorm; gradients of both inputs, with and without that of a residual.

use crate::element::{Element, assert_close, assert_close_at, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Forward<T> = unsafe extern "C" fn(*mut T, *const T, *const T, i64, i32, f32);
type Backward<T> =
    unsafe extern "C" fn(*mut T, *mut f32, *const T, *const T, *const T, *const T, i64, i32, f32);

unsafe extern "C" {
    fn rms_norm_forward_f32(
        y: *mut f32,
        x: *const f32,
        w: *const f32,
        rows: i64,
        cols: i32,
        eps: f32,
    );
    fn rms_norm_forward_bf16(
        y: *mut bf16,
        x: *const bf16,
        w: *const bf16,
        rows: i64,
        cols: i32,
        eps: f32,
    );
    fn rms_norm_forward_f16(
        y: *mut f16,
        x: *const f16,
        w: *const f16,
        rows: i64,
        cols: i32,
        eps: f32,
    );
    fn rms_norm_backward_f32(
        dx: *mut f32,
        partials: *mut f32,
        x: *const f32,
        w: *const f32,
        dy: *const f32,
        residual: *const f32,
        rows: i64,
        cols: i32,
        eps: f32,
    );
    fn rms_norm_backward_bf16(
        dx: *mut bf16,
        partials: *mut f32,
        x: *const bf16,
        w: *const bf16,
        dy: *const bf16,
        residual: *const bf16,
        rows: i64,
        cols: i32,
        eps: f32,
    );
    fn rms_norm_backward_f16(
        dx: *mut f16,
        partials: *mut f32,
        x: *const f16,
        w: *const f16,
        dy: *const f16,
        residual: *const f16,
        rows: i64,
        cols: i32,
        eps: f32,
    );
    fn column_sum_f32(dst: *mut f32, src: *const f32, rows: i64, cols: i64, add: i32);
}

const EPS: f32 = 1e-5;
/// Roundings times the size of the terms of dx, values up to 2 and an inverse of the root mean square up to 10.
const SUMMED: f64 = 16.0 * 10.0;
const SHAPES: [[usize; 2]; 7] = [
    [1, 1],
    [2, 33],
    [127, 33],
    [2, 97],
    [5, 512],
    [3, 1000],
    [1, 1001],
];

fn launch(seed: usize, cols: usize) -> Launch {
    Launch {
        seed: seed as u64,
        ..Launch::new(2 + seed % 2, [64, 256, 1024][seed % 3], 4 * (32 + cols))
    }
}

fn inverse_rms(x: &[f64]) -> f64 {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    1.0 / (mean + f64::from(EPS)).sqrt()
}

fn forward_reference(x: &[f64], w: &[f64]) -> Vec<f64> {
    let rows = x.chunks_exact(w.len());
    rows.flat_map(|x| {
        let r = inverse_rms(x);
        x.iter()
            .zip(w)
            .map(move |(x, w)| x * r * w)
            .collect::<Vec<_>>()
    })
    .collect()
}

/// dx and dw from the chain rule written out: `dy_j/dx_i = w_j (r (i = j) - x_j x_i r^3 / n)`.
fn backward_reference(x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
    let n = w.len();
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; n]);
    for (row, x) in x.chunks_exact(n).enumerate() {
        let (r, dy, dx) = (inverse_rms(x), &dy[row * n..][..n], &mut dx[row * n..][..n]);
        let along: f64 = (0..n).map(|j| dy[j] * w[j] * x[j]).sum();
        for i in 0..n {
            dx[i] = dy[i] * w[i] * r - along * x[i] * r.powi(3) / n as f64;
            dw[i] += dy[i] * x[i] * r;
        }
    }
    [dx, dw]
}

fn check_forward<T: Element>(forward: Forward<T>) {
    for (seed, [rows, cols]) in SHAPES.into_iter().enumerate() {
        let mut rng = rng(seed);
        let x = random::<T>(&mut rng, rows * cols, 2.0);
        let w = random::<T>(&mut rng, cols, 2.0);
        let at = launch(seed, cols);
        let (xs, weight) = (
            Buffer::shifted(x.len(), seed % 3 / 2).with(&x),
            Buffer::from_slice(&w),
        );
        let y = Buffer::<T>::new(x.len());
        let (n, c) = (rows as i64, cols as i32);
        launch!(at, forward(y.ptr(), xs.ptr(), weight.ptr(), n, c, EPS)).unwrap();
        let want = forward_reference(&to_f64(&x), &to_f64(&w));
        assert_close("y", &y.read(), &want, 16.0);
    }
}

fn check_backward<T: Element>(backward: Backward<T>) {
    for (seed, [rows, cols]) in SHAPES.into_iter().enumerate() {
        let mut rng = rng(100 + seed);
        let [x, dy, residual] = [(); 3].map(|()| random::<T>(&mut rng, rows * cols, 2.0));
        let w = random::<T>(&mut rng, cols, 2.0);
        let [want, dw_want] = backward_reference(&to_f64(&x), &to_f64(&w), &to_f64(&dy));
        let [xs, d, around] = [&x, &dy, &residual].map(|values| Buffer::from_slice(values));
        let (weight, dx) = (
            Buffer::from_slice(&w),
            Buffer::<T>::shifted(x.len(), seed % 2),
        );
        let at = launch(seed, cols);
        let num_partials = at.grid[0];
        let partials = Buffer::<f32>::new(num_partials * cols);
        let (p, none) = (partials.ptr(), std::ptr::null_mut());
        let (n, c) = (rows as i64, cols as i32);
        launch!(
            at,
            backward(
                dx.ptr(),
                p,
                xs.ptr(),
                weight.ptr(),
                d.ptr(),
                none,
                n,
                c,
                EPS
            )
        )
        .unwrap();
        // The two terms of dx cancel where a row has one column.
        assert_close_at("dx", &dx.read(), &want, SUMMED);
        let old = random::<f32>(&mut rng, cols, 1.0);
        let dw = Buffer::from_slice(&old);
        let sums = Launch::new(cols.div_ceil(32), 256, 1024);
        launch!(
            sums,
            column_sum_f32(dw.ptr(), p, num_partials as i64, cols as i64, 1)
        )
        .unwrap();
        let dw_want: Vec<f64> = dw_want
            .iter()
            .zip(old)
            .map(|(dw, old)| dw + f64::from(old))
            .collect();
        assert_close("dw", &dw.read(), &dw_want, 32.0);
        // With the gradient around the norm, without that of the weight, in place of dy.
        launch!(
            at,
            backward(
                d.ptr(),
                none.cast(),
                xs.ptr(),
                weight.ptr(),
                d.ptr(),
                around.ptr(),
                n,
                c,
                EPS
            )
        )
        .unwrap();
        let want: Vec<f64> = want
            .iter()
            .zip(&residual)
            .map(|(dx, r)| dx + r.to_f64())
            .collect();
        assert_close_at("dx", &d.read(), &want, SUMMED);
    }
}

#[test]
fn f32_forward_equals_the_reference() {
    check_forward(rms_norm_forward_f32);
}

#[test]
fn bf16_forward_equals_the_reference() {
    check_forward(rms_norm_forward_bf16);
}

#[test]
fn f16_forward_equals_the_reference() {
    check_forward(rms_norm_forward_f16);
}

#[test]
fn f32_backward_equals_the_reference() {
    check_backward(rms_norm_backward_f32);
}

#[test]
fn bf16_backward_equals_the_reference() {
    check_backward(rms_norm_backward_bf16);
}

#[test]
fn f16_backward_equals_the_reference() {
    check_backward(rms_norm_backward_f16);
}
