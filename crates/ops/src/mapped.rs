//! Value by value from tensors of one shape to tensors of that shape, each read and written once.

use crate::chunks::rows_per_chunk;
use crate::element::Element;
use crate::filled::filled_each;
use crate::vectorised::vectorised;
use std::array::from_fn;

/// Values between reading and writing: few enough for the first-level cache, whatever the number of tensors.
const BLOCK: usize = 128;

/// What `f` makes of the values that the inputs, of one length, have at each place; computed in f32, rounded once.
///
/// `f` must be a closure marked `#[inline(always)]`.
pub(crate) fn mapped<T: Element, const IN: usize, const OUT: usize>(
    inputs: [&[T]; IN],
    f: impl Fn([f32; IN]) -> [f32; OUT] + Send + Sync,
) -> [Vec<T>; OUT] {
    let len = inputs.map(<[T]>::len).into_iter().min().unwrap_or(0);
    let chunk_len = rows_per_chunk(1);
    filled_each(
        len,
        chunk_len,
        OUT * len,
        |chunk, mut out: [&mut [T]; OUT]| {
            let start = chunk * chunk_len;
            let len = chunk_len.min(len - start);
            let inputs = inputs.map(|values| &values[start..][..len]);
            vectorised(
                #[inline(always)]
                || {
                    for start in (0..len).step_by(BLOCK) {
                        let end = len.min(start + BLOCK);
                        let results = map_block(inputs.map(|values| &values[start..end]), &f);
                        for (out, results) in out.iter_mut().zip(&results) {
                            for (out, result) in out[start..end].iter_mut().zip(results) {
                                *out = T::nearest(*result);
                            }
                        }
                    }
                },
            );
        },
    )
}

/// In f32, of up to [`BLOCK`] values of each input.
#[inline(always)]
fn map_block<T: Element, const IN: usize, const OUT: usize>(
    inputs: [&[T]; IN],
    f: impl Fn([f32; IN]) -> [f32; OUT],
) -> [[f32; BLOCK]; OUT] {
    let mut wide = [[0f32; BLOCK]; IN];
    for (wide, values) in wide.iter_mut().zip(inputs) {
        for (wide, value) in wide.iter_mut().zip(values) {
            *wide = value.widen();
        }
    }
    let mut results = [[0f32; BLOCK]; OUT];
    for i in 0..BLOCK {
        let of_place: [f32; OUT] = f(from_fn(|input| wide[input][i]));
        for (results, result) in results.iter_mut().zip(of_place) {
            results[i] = result;
        }
    }
    results
}
