//! Scratch memory in cache lines, which each thread keeps for its next use.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Lanes of a line.
pub(crate) const LANES: usize = 16;

/// One cache line, and one AVX-512 register: 16 lanes of 32 bits.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u32; LANES]);

impl Line {
    pub(crate) const ZERO: Line = Line([0; LANES]);
}

thread_local! {
    /// Buffers that are not in use.
    static BUFFERS: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Lines of any content, until they are dropped, by the same thread: what went from one to another would never be used again.
pub(crate) struct Lines {
    buffer: Vec<Line>,
    len: usize,
    not_send: PhantomData<*const ()>,
}

impl Lines {
    /// `len` lines: in the smallest of the thread's buffers that has as many, else in the largest, which grows.
    pub(crate) fn new(len: usize) -> Self {
        let buffer = BUFFERS.with_borrow_mut(|buffers| {
            let size = |i: &usize| buffers[*i].len();
            let indices = 0..buffers.len();
            let fitting = indices.clone().filter(|i| size(i) >= len).min_by_key(size);
            let index = fitting.or_else(|| indices.max_by_key(size));
            index.map(|index| buffers.swap_remove(index))
        });
        let mut buffer = buffer.unwrap_or_default();
        if buffer.len() < len {
            buffer.resize(len, Line::ZERO);
        }
        Self {
            buffer,
            len,
            not_send: PhantomData,
        }
    }
}

/// Asks the first-level cache for the line that a place is in, on x86.
#[inline(always)]
pub(crate) fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: nothing is read, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// The lanes as f32.
pub(crate) fn floats(lines: &[Line]) -> &[f32] {
    // SAFETY: a line is 16 lanes without padding, any bits are an f32, and the lifetime is that of the borrow.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * LANES) }
}

/// The lanes as f32, to be changed.
pub(crate) fn floats_mut(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: as for `floats`.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * LANES) }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // While the thread ends there is nobody to keep it for.
        let _ = BUFFERS.try_with(|buffers| buffers.borrow_mut().push(buffer));
    }
}

impl Deref for Lines {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        &self.buffer[..self.len]
    }
}

impl DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [Line] {
        &mut self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::{Lines, floats, floats_mut};

    #[test]
    fn buffers_are_used_again_and_never_twice_at_a_time() {
        let (mut a, mut b) = (Lines::new(3), Lines::new(5));
        floats_mut(&mut a).fill(1.0);
        floats_mut(&mut b).fill(2.0);
        assert_eq!(floats(&a), [1.0; 48]);
        let place = b.as_ptr();
        drop((a, b));
        assert_eq!(Lines::new(4).as_ptr(), place);
        assert_eq!(Lines::new(9).len(), 9);
    }
}
