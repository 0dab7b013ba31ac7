//! Memory that kernels write to, with guard zones.

use std::cell::Cell;
use std::marker::PhantomData;

/// Bytes before and after the elements; a multiple of the alignment that a GPU's allocator gives.
const GUARD_BYTES: usize = 512;
const ALIGN_BYTES: usize = 256;
/// Makes NaN of f32, f64, bf16 and f16.
const POISON: u8 = 0xff;

/// `len` elements of `T`, NaN at first, between two guard zones.
pub struct Buffer<T> {
    bytes: Vec<Cell<u8>>,
    /// Where the elements start in `bytes`.
    start: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Copy> Buffer<T> {
    /// A buffer whose elements nobody has written.
    pub fn new(len: usize) -> Self {
        Self::shifted(len, 0)
    }

    /// A buffer that starts `shift` elements behind an aligned address, as a view into a larger one may.
    pub fn shifted(len: usize, shift: usize) -> Self {
        let payload = (len + shift) * size_of::<T>();
        let bytes = vec![Cell::new(POISON); payload + 2 * GUARD_BYTES + ALIGN_BYTES];
        let aligned = bytes.as_ptr().align_offset(ALIGN_BYTES);
        let start = aligned + GUARD_BYTES + shift * size_of::<T>();
        Self {
            bytes,
            start,
            len,
            element: PhantomData,
        }
    }

    /// A buffer that holds `values`.
    pub fn from_slice(values: &[T]) -> Self {
        Self::new(values.len()).with(values)
    }

    /// The buffer with `values`, as many as it has elements, in it.
    #[allow(unsafe_code)]
    pub fn with(self, values: &[T]) -> Self {
        assert_eq!(
            values.len(),
            self.len,
            "values for a buffer of another size"
        );
        // SAFETY: the buffer has `len` aligned elements, and `values` is no part of it.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.ptr(), self.len) };
        self
    }

    /// Address of the first element, for a kernel.
    pub fn ptr(&self) -> *mut T {
        self.bytes[self.start..].as_ptr().cast::<T>().cast_mut()
    }

    /// The elements.
    ///
    /// # Panics
    /// If a guard zone was written to.
    #[allow(unsafe_code)]
    pub fn read(&self) -> Vec<T> {
        let end = self.start + self.len * size_of::<T>();
        let guards = self.bytes[..self.start].iter().chain(&self.bytes[end..]);
        assert!(
            guards.into_iter().all(|byte| byte.get() == POISON),
            "a kernel wrote beyond a buffer of {} elements",
            self.len
        );
        // SAFETY: `len` aligned elements that were initialised as bytes; every T in the tests is valid with any bits.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len) }.to_vec()
    }
}
