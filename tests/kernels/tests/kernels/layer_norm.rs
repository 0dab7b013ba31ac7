//! LayerNorm; gradients of its three inputs, each with and without the others, and with that of a residual.

use crate::element::{Element, assert_close, assert_close_at, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};
use std::ptr::null_mut;

type Forward<T> = unsafe extern "C" fn(*mut T, *const T, *const T, *const T, i64, i32, f32);
type Backward<T> = unsafe extern "C" fn(
    *mut T,
    *mut f32,
    *mut f32,
    *const T,
    *const T,
    *const T,
    *const T,
    i64,
    i32,
    f32,
);

macro_rules! kernels {
    ($($forward:ident $backward:ident $t:ty;)*) => {
        unsafe extern "C" {
            $(
                fn $forward(y: *mut $t, x: *const $t, w: *const $t, b: *const $t, rows: i64, cols: i32, eps: f32);
                fn $backward(dx: *mut $t, dw: *mut f32, db: *mut f32, x: *const $t, w: *const $t, dy: *const $t,
                    residual: *const $t, rows: i64, cols: i32, eps: f32);
            )*
            fn column_sum_f32(dst: *mut f32, src: *const f32, rows: i64, cols: i64, add: i32);
        }
    };
}

kernels! {
    layer_norm_forward_f32 layer_norm_backward_f32 f32;
    layer_norm_forward_bf16 layer_norm_backward_bf16 bf16;
    layer_norm_forward_f16 layer_norm_backward_f16 f16;
}

const EPS: f32 = 1e-5;
const SHAPES: [[usize; 2]; 7] = [
    [1, 1],
    [2, 33],
    [127, 33],
    [2, 97],
    [5, 512],
    [3, 1000],
    [1, 1001],
];

fn launch(seed: usize, shared_floats: usize) -> Launch {
    Launch {
        seed: seed as u64,
        ..Launch::new(
            2 + seed % 2,
            [64, 256, 1024][seed % 3],
            4 * (32 + shared_floats),
        )
    }
}

/// Each value less the mean, and the inverse of the standard deviation.
fn centred(x: &[f64]) -> (Vec<f64>, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let centred: Vec<f64> = x.iter().map(|x| x - mean).collect();
    let variance = centred.iter().map(|c| c * c).sum::<f64>() / n;
    (centred, 1.0 / (variance + f64::from(EPS)).sqrt())
}

fn forward_reference(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let rows = x.chunks_exact(w.len());
    rows.flat_map(|x| {
        let (c, r) = centred(x);
        (0..c.len())
            .map(|i| c[i] * r * w[i] + b[i])
            .collect::<Vec<_>>()
    })
    .collect()
}

/// dx, dw and db from the chain rule written out: `dy_j/dx_i = w_j r ((i = j) - 1 / n - c_j c_i r^2 / n)`.
fn backward_reference(x: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let n = w.len();
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; n], vec![0.0; n]);
    for (row, x) in x.chunks_exact(n).enumerate() {
        let ((c, r), dy) = (centred(x), &dy[row * n..][..n]);
        let all: f64 = (0..n).map(|j| dy[j] * w[j]).sum();
        let along: f64 = (0..n).map(|j| dy[j] * w[j] * c[j]).sum();
        for i in 0..n {
            dx[row * n + i] = r * (dy[i] * w[i] - (all + c[i] * along * r * r) / n as f64);
            dw[i] += dy[i] * c[i] * r;
            db[i] += dy[i];
        }
    }
    [dx, dw, db]
}

fn check_forward<T: Element>(forward: Forward<T>) {
    for (seed, [rows, cols]) in SHAPES.into_iter().enumerate() {
        let mut rng = rng(seed);
        let x = random::<T>(&mut rng, rows * cols, 2.0);
        let [w, b] = [(); 2].map(|()| random::<T>(&mut rng, cols, 2.0));
        let at = launch(seed, 0);
        let xs = Buffer::shifted(x.len(), seed % 3 / 2).with(&x);
        let [weight, bias] = [&w, &b].map(|values| Buffer::from_slice(values));
        let (n, c) = (rows as i64, cols as i32);
        let no_bias = vec![T::default(); cols];
        for (bias, b) in [(bias.ptr(), &b), (null_mut(), &no_bias)] {
            let y = Buffer::<T>::new(x.len());
            launch!(
                at,
                forward(y.ptr(), xs.ptr(), weight.ptr(), bias, n, c, EPS)
            )
            .unwrap();
            let want = forward_reference(&to_f64(&x), &to_f64(&w), &to_f64(b));
            // Values are up to 2, their inverse deviation is up to 1 but in the rows of one value.
            assert_close("y", &y.read(), &want, 16.0);
        }
    }
}

/// The sum of the rows that the blocks left.
fn summed(partials: &Buffer<f32>, num_partials: usize, cols: usize) -> Vec<f32> {
    let sum = Buffer::<f32>::new(cols);
    let sums = Launch::new(cols.div_ceil(32), 256, 1024);
    let (from, n) = (partials.ptr(), num_partials as i64);
    launch!(sums, column_sum_f32(sum.ptr(), from, n, cols as i64, 0)).unwrap();
    sum.read()
}

fn check_backward<T: Element>(backward: Backward<T>) {
    for (seed, [rows, cols]) in SHAPES.into_iter().enumerate() {
        let mut rng = rng(100 + seed);
        let [x, dy, residual] = [(); 3].map(|()| random::<T>(&mut rng, rows * cols, 2.0));
        let w = random::<T>(&mut rng, cols, 2.0);
        let [want, dw_want, db_want] = backward_reference(&to_f64(&x), &to_f64(&w), &to_f64(&dy));
        let want_both: Vec<f64> = (want.iter().zip(&residual))
            .map(|(dx, r)| dx + r.to_f64())
            .collect();
        let [xs, around] = [&x, &residual].map(|values| Buffer::from_slice(values));
        let (weight, n, c) = (Buffer::from_slice(&w), rows as i64, cols as i32);
        for wanted in [[true, true], [true, false], [false, true], [false, false]] {
            let with_residual = wanted[0] != wanted[1];
            let d = Buffer::shifted(x.len(), seed % 2).with(&dy);
            let at = launch(seed, wanted.map(|w| cols * usize::from(w)).iter().sum());
            let num_partials = at.grid[0];
            let partials = [(); 2].map(|()| Buffer::<f32>::new(num_partials * cols));
            let out = |i: usize| {
                if wanted[i] {
                    partials[i].ptr()
                } else {
                    null_mut()
                }
            };
            let residual = if with_residual {
                around.ptr()
            } else {
                null_mut()
            };
            let (dw, db) = (out(0), out(1));
            // In place of dy.
            launch!(
                at,
                backward(
                    d.ptr(),
                    dw,
                    db,
                    xs.ptr(),
                    weight.ptr(),
                    d.ptr(),
                    residual,
                    n,
                    c,
                    EPS
                )
            )
            .unwrap();
            let want = if with_residual { &want_both } else { &want };
            // The terms of dx cancel; they are up to 4 times the inverse deviation, which is up to 10 in a few columns.
            assert_close_at("dx", &d.read(), want, 16.0 * 10.0);
            for (i, want) in [&dw_want, &db_want].into_iter().enumerate() {
                if wanted[i] {
                    let got = summed(&partials[i], num_partials, cols);
                    assert_close(["dw", "db"][i], &got, want, 32.0);
                }
            }
        }
    }
}

/// A mean of a thousand deviations: what its rounding leaves must be taken, too.
#[test]
fn a_mean_far_from_zero_costs_no_accuracy() {
    let (rows, cols) = (3, 257);
    let mut rng = rng(7);
    let x: Vec<f32> = random::<f32>(&mut rng, rows * cols, 1.0)
        .iter()
        .map(|x| x + 1000.3)
        .collect();
    let w = vec![1.0; cols];
    let (xs, weight, y) = (
        Buffer::from_slice(&x),
        Buffer::from_slice(&w),
        Buffer::<f32>::new(x.len()),
    );
    let (n, c, at) = (rows as i64, cols as i32, launch(1, 0));
    launch!(
        at,
        layer_norm_forward_f32(y.ptr(), xs.ptr(), weight.ptr(), null_mut(), n, c, EPS)
    )
    .unwrap();
    let want = forward_reference(&to_f64(&x), &to_f64(&w), &vec![0.0; cols]);
    assert_close("y", &y.read(), &want, 16.0);
}

/// Of long ones the mean is far off: what is then left of the variance is rounding, which must not pass as negative.
#[test]
fn long_rows_of_equal_values_stay_finite() {
    let (rows, cols) = (10, 50_021);
    let values = random::<f32>(&mut rng(8), rows, 1e12);
    let x: Vec<f32> = values.iter().flat_map(|x| vec![*x; cols]).collect();
    let (xs, y) = (Buffer::from_slice(&x), Buffer::<f32>::new(x.len()));
    let weight = Buffer::from_slice(&vec![1.0; cols]);
    let (n, c, at) = (rows as i64, cols as i32, launch(0, 0));
    launch!(
        at,
        layer_norm_forward_f32(y.ptr(), xs.ptr(), weight.ptr(), null_mut(), n, c, 1e-12)
    )
    .unwrap();
    assert!(y.read().iter().all(|y| y.is_finite()));
}

#[test]
fn f32_forward_equals_the_reference() {
    check_forward(layer_norm_forward_f32);
}

#[test]
fn bf16_forward_equals_the_reference() {
    check_forward(layer_norm_forward_bf16);
}

#[test]
fn f16_forward_equals_the_reference() {
    check_forward(layer_norm_forward_f16);
}

#[test]
fn f32_backward_equals_the_reference() {
    check_backward(layer_norm_backward_f32);
}

#[test]
fn bf16_backward_equals_the_reference() {
    check_backward(layer_norm_backward_bf16);
}

#[test]
fn f16_backward_equals_the_reference() {
    check_backward(layer_norm_backward_f16);
}
