//! Reductions over a slice in several independent lanes, so that they fill vector registers; the number of lanes is
//! fixed, so that the bits are.

const LANES: usize = 16;

/// The sum of `f(x)`.
#[inline(always)]
pub(crate) fn sum(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    fold(values, 0.0, |lane, x| lane + f(x), |a, b| a + b)
}

/// The largest value, or NaN if there is one: a broken value must not hide behind the others.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
    fold(values, f32::NEG_INFINITY, larger, larger)
}

/// The sum of the products of two slices of one length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a
        .remainder()
        .iter()
        .zip(b.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a.zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + rest
}

#[inline(always)]
fn fold(
    values: &[f32],
    start: f32,
    step: impl Fn(f32, f32) -> f32,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let blocks = values.chunks_exact(LANES);
    let rest = blocks
        .remainder()
        .iter()
        .fold(start, |rest, &x| step(rest, x));
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = step(*lane, x);
        }
    }
    lanes.iter().fold(rest, |total, &lane| join(total, lane))
}
