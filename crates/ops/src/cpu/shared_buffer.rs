//! A buffer of which several threads write disjoint parts.

#![allow(unsafe_code)]

use super::element::Element;
use super::vectorised::vectorised;
use std::marker::PhantomData;

/// A buffer of which several threads write disjoint parts: chunks, or strided matrices such as the heads of `(t, heads, d)`.
pub(crate) struct SharedBuffer<'a, T> {
    data: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is through `change_row`, whose callers keep the rows in use at one time disjoint.
unsafe impl<T: Send> Sync for SharedBuffer<'_, T> {}

impl<'a, T> SharedBuffer<'a, T> {
    /// Borrows `data` for as long as threads write to it.
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self {
            data: data.as_mut_ptr(),
            len: data.len(),
            lifetime: PhantomData,
        }
    }

    /// Lets `change` change `len` elements from `start` on.
    ///
    /// # Safety
    /// Nobody else uses these elements at the same time.
    pub(crate) unsafe fn change_row(
        &self,
        start: usize,
        len: usize,
        change: impl FnOnce(&mut [T]),
    ) {
        assert!(
            start <= self.len && len <= self.len - start,
            "row of {len} elements at {start} in a buffer of {}",
            self.len
        );
        // SAFETY: the elements are in the buffer by the check above, and only ours as promised by the caller.
        change(unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) });
    }
}

impl<T: Element> SharedBuffer<'_, T> {
    /// Writes rows of `cols` elements, `row_stride` apart, from element `start` on, or if `ADD` adds them to what is there: values, each times the factor of
    /// its row, rounded.
    ///
    /// # Safety
    /// Nobody else uses these elements at the same time.
    pub(crate) unsafe fn put_rows<'v, const ADD: bool>(
        &self,
        start: usize,
        row_stride: usize,
        cols: usize,
        rows: impl Iterator<Item = (&'v [f32], f32)>,
    ) {
        for (row, (values, factor)) in rows.enumerate() {
            let change = |out: &mut [T]| {
                vectorised(
                    #[inline(always)]
                    || {
                        for (out, value) in out.iter_mut().zip(values) {
                            let value = value * factor;
                            *out = T::nearest(if ADD { out.widen() + value } else { value });
                        }
                    },
                );
            };
            // SAFETY: the caller's promise.
            unsafe { self.change_row(start + row * row_stride, cols, change) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SharedBuffer;

    #[test]
    #[should_panic(expected = "in a buffer of 7")]
    fn rows_beyond_a_shared_buffer_are_refused() {
        let mut out = [0f32; 7];
        let shared = SharedBuffer::new(&mut out);
        let row: &[f32] = &[1.0; 3];
        // SAFETY: nobody else writes.
        unsafe { shared.put_rows::<false>(1, 4, 3, [(row, 1.0), (row, 1.0)].into_iter()) };
    }
}
