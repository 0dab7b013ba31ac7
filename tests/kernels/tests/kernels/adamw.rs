//! AdamW: the bits of the CPU's update, and the f64 formula over several steps.

use crate::element::{assert_close, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::bf16;

unsafe extern "C" {
    fn adamw_f32(
        master: *mut f32,
        exp_avg: *mut f32,
        exp_avg_sq: *mut f32,
        grad: *const f32,
        len: i64,
        step_size: f32,
        correction: f32,
        shrink: f32,
        rest1: f32,
        beta2: f32,
        rest2: f32,
        eps: f32,
        scale: f32,
        device_scale: *const f32,
    );
    fn adamw_bf16(
        master: *mut f32,
        exp_avg: *mut f32,
        exp_avg_sq: *mut f32,
        weights: *mut bf16,
        grad: *const f32,
        len: i64,
        step_size: f32,
        correction: f32,
        shrink: f32,
        rest1: f32,
        beta2: f32,
        rest2: f32,
        eps: f32,
        scale: f32,
        device_scale: *const f32,
    );
}

const LR: f64 = 0.01;
const BETAS: [f64; 2] = [0.9, 0.95];
const EPS: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.1;

/// step_size, correction, shrink, rest1, beta2, rest2, eps of step `step`.
fn constants(step: i32) -> [f32; 7] {
    [
        LR / (1.0 - BETAS[0].powi(step)),
        1.0 / (1.0 - BETAS[1].powi(step)).sqrt(),
        1.0 - LR * WEIGHT_DECAY,
        1.0 - BETAS[0],
        BETAS[1],
        1.0 - BETAS[1],
        EPS,
    ]
    .map(|x| x as f32)
}

/// The CPU optimizer's arithmetic, in f32.
fn cpu_update([x, m, v]: [&mut f32; 3], g: f32, step: i32, scale: f32) {
    let [step_size, correction, shrink, rest1, beta2, rest2, eps] = constants(step);
    let g = g * scale;
    *m += (g - *m) * rest1;
    *v = *v * beta2 + g * g * rest2;
    *x = *x * shrink - step_size * *m / (v.sqrt() * correction + eps);
}

#[test]
fn both_kernels_give_the_bits_of_the_cpu() {
    let mut rng = rng(7);
    for (len, shift) in [(1, 0), (33, 0), (1000, 0), (1001, 1)] {
        let mut x = random::<f32>(&mut rng, len, 1.0);
        let (mut m, mut v) = (vec![0f32; len], vec![0f32; len]);
        let start = || Buffer::shifted(len, shift).with(&x);
        let zeros = || Buffer::from_slice(&vec![0f32; len]);
        let f32_state = [start(), zeros(), zeros()];
        let bf16_state = [start(), zeros(), zeros()];
        let weights = Buffer::<bf16>::new(len);
        let factor = Buffer::from_slice(&[0.37f32]);
        let launch = Launch::new(3, 64, 0);
        for step in 1..4 {
            let grad = random::<f32>(&mut rng, len, 10f64.powi(2 - 2 * step));
            let g = Buffer::from_slice(&grad);
            let [a, b, c, d, e, f, h] = constants(step);
            let [x1, m1, v1] = f32_state.each_ref().map(Buffer::ptr);
            let n = len as i64;
            let none = std::ptr::null();
            let scale = 0.5f32 * 0.37;
            launch!(
                launch,
                adamw_f32(x1, m1, v1, g.ptr(), n, a, b, c, d, e, f, h, scale, none)
            )
            .unwrap();
            let [x2, m2, v2] = bf16_state.each_ref().map(Buffer::ptr);
            let (w, s) = (weights.ptr(), factor.ptr());
            launch!(
                launch,
                adamw_bf16(x2, m2, v2, w, g.ptr(), n, a, b, c, d, e, f, h, 0.5, s)
            )
            .unwrap();
            for (i, g) in grad.iter().enumerate() {
                cpu_update([&mut x[i], &mut m[i], &mut v[i]], *g, step, scale);
            }
            for state in [&f32_state, &bf16_state] {
                for (got, want) in state.iter().zip([&x, &m, &v]) {
                    assert_eq!(&got.read(), want, "step {step}");
                }
            }
            let rounded: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            assert_eq!(weights.read(), rounded);
        }
    }
}

#[test]
fn several_steps_equal_the_f64_formula() {
    let mut rng = rng(8);
    let len = 97;
    let x = random::<f32>(&mut rng, len, 1.0);
    let mut want: Vec<[f64; 3]> = x.iter().map(|x| [f64::from(*x), 0.0, 0.0]).collect();
    let zeros = vec![0f32; len];
    let [x, m, v] = [&x, &zeros, &zeros].map(|values| Buffer::from_slice(values));
    for step in 1..6 {
        let grad = random::<f32>(&mut rng, len, 1.0);
        let g = Buffer::from_slice(&grad);
        let [a, b, c, d, e, f, h] = constants(step);
        let (n, none) = (len as i64, std::ptr::null());
        let launch = Launch::new(1, 32, 0);
        launch!(
            launch,
            adamw_f32(
                x.ptr(),
                m.ptr(),
                v.ptr(),
                g.ptr(),
                n,
                a,
                b,
                c,
                d,
                e,
                f,
                h,
                1.0,
                none
            )
        )
        .unwrap();
        for ([x, m, v], g) in want.iter_mut().zip(grad) {
            let g = f64::from(g);
            *m = BETAS[0] * *m + (1.0 - BETAS[0]) * g;
            *v = BETAS[1] * *v + (1.0 - BETAS[1]) * g * g;
            let (m, v) = (
                *m / (1.0 - BETAS[0].powi(step)),
                *v / (1.0 - BETAS[1].powi(step)),
            );
            *x -= LR * WEIGHT_DECAY * *x + LR * m / (v.sqrt() + EPS);
        }
    }
    let want: Vec<f64> = want.iter().map(|[x, ..]| *x).collect();
    assert_close("x", &x.read(), &want, 16.0);
}

#[test]
fn a_nan_scale_leaves_everything_as_it_was() {
    let [x, m, v, g] = [(); 4].map(|()| Buffer::from_slice(&[0.5f32; 7]));
    let (weights, scale) = (Buffer::<bf16>::new(7), Buffer::from_slice(&[f32::NAN]));
    let [a, b, c, d, e, f, h] = constants(1);
    let (at, w, s) = (Launch::new(1, 32, 0), weights.ptr(), scale.ptr());
    launch!(
        at,
        adamw_bf16(
            x.ptr(),
            m.ptr(),
            v.ptr(),
            w,
            g.ptr(),
            7,
            a,
            b,
            c,
            d,
            e,
            f,
            h,
            1.0,
            s
        )
    )
    .unwrap();
    assert!([x, m, v].iter().all(|values| values.read() == [0.5; 7]));
    assert!(weights.read().iter().all(|weight| weight.is_nan()));
}
