//! Fresh buffers that the threads fill chunk by chunk.
//!
//! Zeroing a whole buffer first is one more trip to memory, on one thread. Here each chunk is zeroed just before it is
//! filled, by the thread that fills it: it is in the cache by then.

#![allow(unsafe_code)]

use super::chunks::{for_each_chunk, rows_per_chunk};
use super::element::Element;
use super::shared_buffer::SharedBuffer;
use std::array::from_fn;
use std::mem::MaybeUninit;

/// A buffer of `len` elements on whose chunks, full of zeros, `f(i, chunk)` was called.
pub(crate) fn filled<T: Element>(
    len: usize,
    chunk_len: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    let spare = &mut out.spare_capacity_mut()[..len];
    for_each_chunk(spare, chunk_len, work, |i, chunk| f(i, zeroed(chunk)));
    // SAFETY: the chunks are the whole of `spare`, and each was zeroed.
    unsafe { out.set_len(len) };
    out
}

/// As [`filled`], for two buffers of equally many chunks; lengths of `(buffer, chunk)`.
pub(crate) fn filled2<A: Element, B: Element>(
    (a_len, a_chunk): (usize, usize),
    (b_len, b_chunk): (usize, usize),
    work: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Send + Sync,
) -> (Vec<A>, Vec<B>) {
    let (a_chunk, b_chunk) = (a_chunk.max(1), b_chunk.max(1));
    // Chunks without a partner would stay as they are.
    assert_eq!(a_len.div_ceil(a_chunk), b_len.div_ceil(b_chunk));
    let (mut a, mut b) = (Vec::with_capacity(a_len), Vec::with_capacity(b_len));
    let a_spare = &mut a.spare_capacity_mut()[..a_len];
    let b_spare = SharedBuffer::new(&mut b.spare_capacity_mut()[..b_len]);
    for_each_chunk(a_spare, a_chunk, work, |i, a| {
        let start = i * b_chunk;
        let len = b_chunk.min(b_len - start);
        // SAFETY: each index comes once, and their chunks do not overlap.
        unsafe { b_spare.change_row(start, len, |b| f(i, zeroed(a), zeroed(b))) };
    });
    // SAFETY: there are equally many chunks, so each of the two buffers was zeroed as a whole.
    unsafe {
        a.set_len(a_len);
        b.set_len(b_len);
    }
    (a, b)
}

/// As [`filled`], for some buffers of one length.
pub(crate) fn filled_each<T: Element, const N: usize>(
    len: usize,
    chunk_len: usize,
    work: usize,
    f: impl Fn(usize, [&mut [T]; N]) + Send + Sync,
) -> [Vec<T>; N] {
    let chunk_len = chunk_len.max(1);
    let mut out: [Vec<T>; N] = from_fn(|_| Vec::with_capacity(len));
    let mut buffers = out
        .each_mut()
        .map(|out| out.spare_capacity_mut()[..len].chunks_mut(chunk_len));
    let next_of_each = |_| {
        buffers
            .each_mut()
            .map(|chunks| chunks.next().unwrap_or_default())
    };
    let mut chunks: Vec<[&mut [MaybeUninit<T>]; N]> =
        (0..len.div_ceil(chunk_len)).map(next_of_each).collect();
    for_each_chunk(&mut chunks, 1, work, |i, chunks| {
        for chunks in chunks {
            f(i, chunks.each_mut().map(|chunk| zeroed(chunk)));
        }
    });
    for out in &mut out {
        // SAFETY: the chunks are the whole of each buffer, and each was zeroed.
        unsafe { out.set_len(len) };
    }
    out
}

/// `len` zeros, written by all threads.
pub(crate) fn zeros<T: Element>(len: usize) -> Vec<T> {
    filled(len, rows_per_chunk(1), len, |_, _| ())
}

/// A copy, made by all threads.
pub(crate) fn copied<T: Element>(values: &[T]) -> Vec<T> {
    let len = rows_per_chunk(1);
    filled(values.len(), len, values.len(), |i, out: &mut [T]| {
        out.copy_from_slice(&values[i * len..][..out.len()]);
    })
}

fn zeroed<T: Element>(chunk: &mut [MaybeUninit<T>]) -> &mut [T] {
    chunk.fill(MaybeUninit::new(T::zero()));
    // SAFETY: `MaybeUninit<T>` has the layout of T, and every element was just written.
    unsafe { &mut *(std::ptr::from_mut(chunk) as *mut [T]) }
}
