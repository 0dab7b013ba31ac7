//! Reductions over a slice in several independent lanes, so that they fill vector registers; the number of lanes is
//! fixed, so that the bits are.

use super::element::Element;
use super::exp::exp;

const LANES: usize = 32;

/// The sum of `f(x)`.
#[inline(always)]
pub(crate) fn sum<T: Element>(values: &[T], f: impl Fn(f32) -> f32) -> f32 {
    fold(values, 0.0, |lane, x| lane + f(x), |a, b| a + b)
}

/// The largest `f(x)`, or NaN if there is one: a broken value must not hide behind the others.
#[inline(always)]
pub(crate) fn max<T: Element>(values: &[T], f: impl Fn(f32) -> f32) -> f32 {
    let larger = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
    fold(values, f32::NEG_INFINITY, |a, x| larger(a, f(x)), larger)
}

/// The sum of the products of two slices of one length.
#[inline(always)]
pub(crate) fn dot<A: Element, B: Element>(a: &[A], b: &[B]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    let rest: f32 = rest.map(|(a, b)| a.widen() * b.widen()).sum();
    for (a, b) in a.zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a.widen() * b.widen();
        }
    }
    join(lanes, |a, b| a + b) + rest
}

/// Replaces each `x` by `exp(f(x))`; returns their sum.
#[inline(always)]
pub(crate) fn replace_by_exp(values: &mut [f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut blocks = values.chunks_exact_mut(LANES);
    for block in &mut blocks {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *x = exp(f(*x));
            *lane += *x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(blocks.into_remainder()) {
        *x = exp(f(*x));
        *lane += *x;
    }
    join(lanes, |a, b| a + b)
}

/// Replaces each `x` of `a` by `exp(f(x))`; returns their sum, and that of their products with `b`, a slice of the same length.
#[inline(always)]
pub(crate) fn replace_by_exp_and_dot(
    a: &mut [f32],
    b: &[f32],
    f: impl Fn(f32) -> f32,
) -> (f32, f32) {
    let (mut sums, mut dots) = ([0f32; LANES], [0f32; LANES]);
    let (mut a, b) = (a.chunks_exact_mut(LANES), b.chunks_exact(LANES));
    let b_rest = b.remainder();
    for (a, b) in (&mut a).zip(b) {
        let lanes = sums.iter_mut().zip(&mut dots);
        for ((sum, dot), (a, b)) in lanes.zip(a.iter_mut().zip(b)) {
            *a = exp(f(*a));
            *sum += *a;
            *dot += *a * b;
        }
    }
    let rest = a.into_remainder().iter_mut().zip(b_rest);
    for ((sum, dot), (a, b)) in sums.iter_mut().zip(&mut dots).zip(rest) {
        *a = exp(f(*a));
        *sum += *a;
        *dot += *a * b;
    }
    [sums, dots].map(|lanes| join(lanes, |a, b| a + b)).into()
}

#[inline(always)]
fn fold<T: Element>(
    values: &[T],
    start: f32,
    step: impl Fn(f32, f32) -> f32,
    join_two: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let blocks = values.chunks_exact(LANES);
    for (lane, x) in lanes.iter_mut().zip(blocks.remainder()) {
        *lane = step(*lane, x.widen());
    }
    for block in blocks {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *lane = step(*lane, x.widen());
        }
    }
    join(lanes, join_two)
}

/// Joins the lanes in pairs: one after the other would take longer than a row of some hundred elements.
#[inline(always)]
fn join(mut lanes: [f32; LANES], two: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = two(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}
