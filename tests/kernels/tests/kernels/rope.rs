//! Rotary position embedding, both directions.

use crate::element::{Element, assert_close, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Rope<T> = unsafe extern "C" fn(*mut T, *const f32, *const f32, i64, i32, i32, i32, f32);

unsafe extern "C" {
    fn rope_f32(
        x: *mut f32,
        cos: *const f32,
        sin: *const f32,
        rows: i64,
        t: i32,
        heads: i32,
        half: i32,
        sign: f32,
    );
    fn rope_bf16(
        x: *mut bf16,
        cos: *const f32,
        sin: *const f32,
        rows: i64,
        t: i32,
        heads: i32,
        half: i32,
        sign: f32,
    );
    fn rope_f16(
        x: *mut f16,
        cos: *const f32,
        sin: *const f32,
        rows: i64,
        t: i32,
        heads: i32,
        half: i32,
        sign: f32,
    );
}

/// Hugging Face's words: `x * cos + rotate_half(x) * sin`, with the tables repeated for both halves.
fn reference(x: &[f64], cos: &[f64], sin: &[f64], [t, heads, d]: [usize; 3]) -> Vec<f64> {
    let rotated = |start: usize, i: usize| match i < d / 2 {
        true => -x[start + i + d / 2],
        false => x[start + i - d / 2],
    };
    (0..x.len())
        .map(|index| {
            let (row, i) = (index / d, index % d);
            let angle = row / heads % t * (d / 2) + i % (d / 2);
            x[index] * cos[angle] + rotated(row * d, i) * sin[angle]
        })
        .collect()
}

fn check<T: Element>(rope: Rope<T>) {
    let mut rng = rng(4);
    for [b, t, heads, d] in [
        [1, 1, 1, 2],
        [2, 3, 1, 16],
        [1, 127, 2, 48],
        [3, 2, 5, 64],
        [2, 5, 3, 128],
        [1, 7, 2, 6],
    ] {
        let angles = random::<f32>(&mut rng, t * d / 2, 3.0);
        let cos: Vec<f32> = angles.iter().map(|x| x.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|x| x.sin()).collect();
        let x = random::<T>(&mut rng, b * t * heads * d, 2.0);
        let (c, s) = (Buffer::from_slice(&cos), Buffer::from_slice(&sin));
        let tables = [&cos, &sin].map(|table| crate::element::to_f64(table));
        for (sign, shift) in [(1.0f32, 0), (-1.0, 0), (1.0, 1)] {
            let xs = Buffer::shifted(x.len(), shift).with(&x);
            let (rows, half) = ((b * t * heads) as i64, d as i32 / 2);
            let launch = Launch::new(2, 64, 0);
            launch!(
                launch,
                rope(
                    xs.ptr(),
                    c.ptr(),
                    s.ptr(),
                    rows,
                    t as i32,
                    heads as i32,
                    half,
                    sign
                )
            )
            .unwrap();
            let sin: Vec<f64> = tables[1].iter().map(|x| x * f64::from(sign)).collect();
            let want = reference(&crate::element::to_f64(&x), &tables[0], &sin, [t, heads, d]);
            assert_close("x", &xs.read(), &want, 4.0);
        }
    }
}

#[test]
fn f32_equals_the_reference() {
    check::<f32>(rope_f32);
}

#[test]
fn bf16_equals_the_reference() {
    check::<bf16>(rope_bf16);
}

#[test]
fn f16_equals_the_reference() {
    check::<f16>(rope_f16);
}
