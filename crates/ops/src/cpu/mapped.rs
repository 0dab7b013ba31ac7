//! Value by value from tensors of one shape to tensors of that shape, each read and written once.

use super::chunks::rows_per_chunk;
use super::element::Element;
use super::filled::filled_each;
use super::vectorised::vectorised;

/// Values computed at a time: some vectors, so that the long chain of operations of one does not wait for that of another.
const LANES: usize = 64;

/// What `f` makes of the values that the inputs, of one length, have at each place; computed in f32, rounded once.
///
/// `f` must be marked `#[inline(always)]`.
pub(crate) fn mapped<T: Element, const IN: usize, const OUT: usize>(
    inputs: [&[T]; IN],
    f: impl Fn([f32; IN]) -> [f32; OUT] + Send + Sync,
) -> [Vec<T>; OUT] {
    let len = inputs.map(<[T]>::len).into_iter().min().unwrap_or(0);
    let chunk_len = rows_per_chunk(1);
    let work = OUT * len;
    filled_each(len, chunk_len, work, |chunk, mut out: [&mut [T]; OUT]| {
        let start = chunk * chunk_len;
        let len = chunk_len.min(len - start);
        let inputs = inputs.map(|values| &values[start..][..len]);
        vectorised(
            #[inline(always)]
            || map_chunk(inputs, &mut out, &f),
        );
    })
}

#[inline(always)]
fn map_chunk<T: Element, const IN: usize, const OUT: usize>(
    inputs: [&[T]; IN],
    out: &mut [&mut [T]; OUT],
    f: &impl Fn([f32; IN]) -> [f32; OUT],
) {
    let blocks = inputs.map(<[T]>::as_chunks::<LANES>);
    let num_blocks = blocks.first().map_or(0, |(blocks, _)| blocks.len());
    for i in 0..num_blocks {
        let results = map_lanes(blocks.map(|(blocks, _)| &blocks[i]), f);
        for (out, results) in out.iter_mut().zip(&results) {
            round_into(&mut out.as_chunks_mut::<LANES>().0[i], results);
        }
    }
    let padded = blocks.map(|(_, rest)| {
        let mut padded = [T::zero(); LANES];
        padded[..rest.len()].copy_from_slice(rest);
        padded
    });
    let results = map_lanes(padded.each_ref(), f);
    for (out, results) in out.iter_mut().zip(&results) {
        round_into(out.as_chunks_mut::<LANES>().1, results);
    }
}

#[inline(always)]
fn map_lanes<T: Element, const IN: usize, const OUT: usize>(
    inputs: [&[T; LANES]; IN],
    f: &impl Fn([f32; IN]) -> [f32; OUT],
) -> [[f32; LANES]; OUT] {
    let mut results = [[0f32; LANES]; OUT];
    for i in 0..LANES {
        let mut values = [0f32; IN];
        for (value, input) in values.iter_mut().zip(&inputs) {
            *value = input[i].widen();
        }
        for (results, result) in results.iter_mut().zip(f(values)) {
            results[i] = result;
        }
    }
    results
}

/// As many of the values as there is room for.
#[inline(always)]
fn round_into<T: Element>(out: &mut [T], values: &[f32; LANES]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = T::nearest(*value);
    }
}
