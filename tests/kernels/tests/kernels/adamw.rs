//! AdamW: the bits of the CPU's update, and the f64 formula over several steps.

use crate::element::{Element, assert_close, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};
use std::ffi::c_void;

/// `AdamWSlot` of the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Slot {
    weights: *mut c_void,
    start: i64,
    len: i64,
    decay_factor: f32,
    unused: i32,
}

/// `AdamWSlots` of the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Slots([Slot; 16]);

macro_rules! kernels {
    ($($name:ident: $master:ty;)*) => {
        unsafe extern "C" {
            $(fn $name(
                master: *mut $master,
                exp_avg: *mut f32,
                exp_avg_sq: *mut f32,
                grad: *const f32,
                slots: Slots,
                step_size: f32,
                correction: f32,
                one_minus_beta1: f32,
                beta2: f32,
                one_minus_beta2: f32,
                eps: f32,
                scale: f32,
            );)*
        }
    };
}

kernels! { adamw_f32: f32; adamw_bf16: f32; adamw_f16: f32; adamw_split: i16; }

#[rustfmt::skip]
type Kernel = unsafe extern "C" fn(
    *mut f32, *mut f32, *mut f32, *const f32, Slots, f32, f32, f32, f32, f32, f32, f32,
);

const LR: f64 = 0.01;
const BETAS: [f64; 2] = [0.9, 0.95];
const EPS: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.1;

const SHRINK: f32 = (1.0 - LR * WEIGHT_DECAY) as f32;

/// step_size, correction, one_minus_beta1, beta2, one_minus_beta2, eps of step `step`.
fn constants(step: i32) -> [f32; 6] {
    [
        LR / (1.0 - BETAS[0].powi(step)),
        1.0 / (1.0 - BETAS[1].powi(step)).sqrt(),
        1.0 - BETAS[0],
        BETAS[1],
        1.0 - BETAS[1],
        EPS,
    ]
    .map(|x| x as f32)
}

/// Slots for weights at these addresses, one after the other; every second one decays.
fn slots<T>(weights: &[(*mut T, usize)]) -> Slots {
    let none = Slot {
        weights: std::ptr::null_mut(),
        start: 0,
        len: 0,
        decay_factor: f32::NAN,
        unused: 0,
    };
    let (mut slots, mut start) = (Slots([none; 16]), 0);
    for (i, (weights, len)) in weights.iter().enumerate() {
        slots.0[i] = Slot {
            weights: weights.cast(),
            start,
            len: *len as i64,
            decay_factor: decay_factor(i),
            unused: 0,
        };
        start += *len as i64;
    }
    slots
}

fn decay_factor(slot: usize) -> f32 {
    if slot.is_multiple_of(2) { SHRINK } else { 1.0 }
}

/// The CPU optimizer's arithmetic, in f32.
fn cpu_update([x, m, v]: [&mut f32; 3], g: f32, step: i32, (decay_factor, scale): (f32, f32)) {
    let [
        step_size,
        correction,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
    ] = constants(step);
    let g = g * scale;
    *m += (g - *m) * one_minus_beta1;
    *v = *v * beta2 + g * g * one_minus_beta2;
    *x = *x * decay_factor - step_size * *m / (v.sqrt() * correction + eps);
}

#[test]
fn all_types_of_weights_give_the_bits_of_the_cpu() {
    check_bits::<bf16>(adamw_bf16);
    check_bits::<f16>(adamw_f16);
}

/// Of weights in f32, and of weights of `T` rounded from masters.
fn check_bits<T: Element>(adamw_narrow: Kernel) {
    let mut rng = rng(7);
    for (lens, shift) in [
        (&[1][..], 0),
        (&[33, 4, 0, 1000], 0),
        (&[8, 3, 1001, 16], 1),
    ] {
        let len = lens.iter().sum();
        let slot_of: Vec<usize> = lens
            .iter()
            .enumerate()
            .flat_map(|(slot, len)| vec![slot; *len])
            .collect();
        let mut x = random::<f32>(&mut rng, len, 1.0);
        let (mut m, mut v) = (vec![0f32; len], vec![0f32; len]);
        let zeros = || Buffer::shifted(len, shift).with(&vec![0f32; len]);
        let (f32_state, narrow_state) = ([zeros(), zeros()], [zeros(), zeros()]);
        let master = Buffer::shifted(len, shift).with(&x);
        let mut rest = &x[..];
        let weights: Vec<Buffer<f32>> = lens
            .iter()
            .map(|len| {
                let (mine, others) = rest.split_at(*len);
                rest = others;
                Buffer::from_slice(mine)
            })
            .collect();
        let rounded: Vec<Buffer<T>> = lens.iter().map(|len| Buffer::new(*len)).collect();
        let at: Vec<_> = weights.iter().map(Buffer::ptr).zip(lens.to_vec()).collect();
        let in_f32 = slots(&at);
        let at: Vec<_> = rounded.iter().map(Buffer::ptr).zip(lens.to_vec()).collect();
        let in_narrow = slots(&at);
        let launch = Launch {
            grid: [3, lens.len(), 1],
            ..Launch::new(1, 64, 0)
        };
        for step in 1..4 {
            let grad = random::<f32>(&mut rng, len, 10f64.powi(2 - 2 * step));
            let g = Buffer::from_slice(&grad);
            let [a, b, c, d, e, f] = constants(step);
            let none = std::ptr::null_mut();
            let [m1, v1] = f32_state.each_ref().map(Buffer::ptr);
            launch!(
                launch,
                adamw_f32(none, m1, v1, g.ptr(), in_f32, a, b, c, d, e, f, 0.37)
            )
            .unwrap();
            let ([m2, v2], x2) = (narrow_state.each_ref().map(Buffer::ptr), master.ptr());
            launch!(
                launch,
                adamw_narrow(x2, m2, v2, g.ptr(), in_narrow, a, b, c, d, e, f, 0.37)
            )
            .unwrap();
            for (i, g) in grad.iter().enumerate() {
                let factors = (decay_factor(slot_of[i]), 0.37);
                cpu_update([&mut x[i], &mut m[i], &mut v[i]], *g, step, factors);
            }
            for state in [&f32_state, &narrow_state] {
                for (got, want) in state.iter().zip([&m, &v]) {
                    assert_eq!(&got.read(), want, "step {step}");
                }
            }
            assert_eq!(master.read(), x);
            let updated: Vec<f32> = weights.iter().flat_map(Buffer::read).collect();
            assert_eq!(updated, x);
            let updated: Vec<T> = rounded.iter().flat_map(Buffer::read).collect();
            let want: Vec<T> = x.iter().map(|x| T::from_f64(f64::from(*x))).collect();
            assert_eq!(updated, want);
        }
    }
}

/// The nearest bf16 of a master, what is missing, and what both make together.
fn split(x: f32) -> (bf16, i16, f32) {
    let weight = bf16::from_f32(x);
    let upper = i64::from(weight.to_bits()) << 16;
    let remainder = (i64::from(x.to_bits()) - upper).min(0x7fff);
    (
        weight,
        remainder as i16,
        f32::from_bits((upper + remainder) as u32),
    )
}

#[test]
fn masters_are_weights_and_remainders() {
    let mut rng = rng(9);
    for (lens, shift) in [
        (&[1][..], 0),
        (&[33, 4, 0, 1000], 0),
        (&[8, 3, 1001, 16], 1),
    ] {
        let len: usize = lens.iter().sum();
        let mut x = random::<f32>(&mut rng, len, 1.0);
        // One in the middle of two weights.
        x[0] = f32::from_bits(0x3f80_8000);
        let (mut m, mut v) = (vec![0f32; len], vec![0f32; len]);
        let zeros = || Buffer::shifted(len, shift).with(&vec![0f32; len]);
        let state = [zeros(), zeros()];
        let lower: Vec<i16> = x.iter().map(|x| split(*x).1).collect();
        let remainders = Buffer::shifted(len, shift).with(&lower);
        let upper: Vec<bf16> = x.iter().map(|x| split(*x).0).collect();
        let (mut rest, mut slot_of) = (&upper[..], Vec::new());
        let mut weights = Vec::new();
        for (slot, len) in lens.iter().enumerate() {
            let (mine, others) = rest.split_at(*len);
            weights.push(Buffer::shifted(*len, shift).with(mine));
            slot_of.extend(vec![slot; *len]);
            rest = others;
        }
        let at: Vec<_> = weights.iter().map(Buffer::ptr).zip(lens.to_vec()).collect();
        let slots = slots(&at);
        let launch = Launch {
            grid: [3, lens.len(), 1],
            ..Launch::new(1, 64, 0)
        };
        for step in 1..4 {
            let grad = random::<f32>(&mut rng, len, 1.0);
            let g = Buffer::from_slice(&grad);
            let [a, b, c, d, e, f] = constants(step);
            let ([m1, v1], r) = (state.each_ref().map(Buffer::ptr), remainders.ptr());
            launch!(
                launch,
                adamw_split(r, m1, v1, g.ptr(), slots, a, b, c, d, e, f, 0.37)
            )
            .unwrap();
            for (i, g) in grad.iter().enumerate() {
                x[i] = split(x[i]).2;
                let factors = (decay_factor(slot_of[i]), 0.37);
                cpu_update([&mut x[i], &mut m[i], &mut v[i]], *g, step, factors);
            }
            for (got, want) in state.iter().zip([&m, &v]) {
                assert_eq!(&got.read(), want, "step {step}");
            }
            let got = weights.iter().flat_map(Buffer::read).zip(remainders.read());
            let want = x.iter().map(|x| split(*x));
            for (got, (weight, remainder, _)) in got.zip(want) {
                assert_eq!(got, (weight, remainder), "step {step}");
            }
        }
    }
    // A zero that was put in where another value had a remainder below zero.
    let (zero, below) = (
        Buffer::from_slice(&[-bf16::ZERO]),
        Buffer::from_slice(&[-7i16]),
    );
    let [m, v, g] = [(); 3].map(|()| Buffer::from_slice(&[0f32]));
    let (m, v, g, r) = (m.ptr(), v.ptr(), g.ptr(), below.ptr());
    let slots = slots(&[(zero.ptr(), 1)]);
    let [a, b, c, d, e, f] = constants(1);
    launch!(
        Launch::new(1, 32, 0),
        adamw_split(r, m, v, g, slots, a, b, c, d, e, f, 1.0)
    )
    .unwrap();
    assert_eq!((zero.read(), below.read()), (vec![-bf16::ZERO], vec![0]));
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
        let [a, b, c, d, e, f] = constants(step);
        let (launch, slots) = (Launch::new(1, 32, 0), slots(&[(x.ptr(), len)]));
        let (m, v, g) = (m.ptr(), v.ptr(), g.ptr());
        let none = std::ptr::null_mut();
        launch!(
            launch,
            adamw_f32(none, m, v, g, slots, a, b, c, d, e, f, 1.0)
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
