//! Memory that MPI reads and writes: vectors, whole or cut into parts that are owned one by one, so that some are with MPI while
//! others are read or written here.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::Result;
use crate::Error;
use crate::reduction::element::Element;

/// Some bytes of a vector, owned: no other buffer has any of them, and they stay in place when it is moved.
pub(super) struct Buffer {
    vec: Arc<Region>,
    start: usize,
    num_bytes: usize,
}

/// A vector of elements of some type, whose memory buffers have.
struct Region {
    vec: Box<dyn Any + Send + Sync>,
    base: *mut u8,
}

// SAFETY: a region owns its vector. Its elements are reached through buffers only, which overlap nowhere.
unsafe impl Send for Region {}
// SAFETY: a shared region gives access to nothing: see above.
unsafe impl Sync for Region {}

impl Buffer {
    /// All of `vec`.
    pub fn new<T: Element>(mut vec: Vec<T>) -> Self {
        Self {
            start: 0,
            num_bytes: size_of_val(&*vec),
            vec: Arc::new(Region {
                base: vec.as_mut_ptr().cast(),
                vec: Box::new(vec),
            }),
        }
    }

    /// New memory, for elements of any type.
    pub fn zeros(num_bytes: usize) -> Self {
        // Aligned for all of them.
        let whole = Self::new(vec![0i64; num_bytes.div_ceil(size_of::<i64>())]);
        Self { num_bytes, ..whole }
    }

    /// Takes the next `num_bytes` bytes off its front; an error if it has fewer.
    pub fn take(&mut self, num_bytes: usize) -> Result<Self> {
        let Some(rest) = self.num_bytes.checked_sub(num_bytes) else {
            let message = "parts of a vector are longer than the vector";
            return Err(Error::Backend(message.into()));
        };
        let taken = Self {
            vec: self.vec.clone(),
            start: self.start,
            num_bytes,
        };
        (self.start, self.num_bytes) = (self.start + num_bytes, rest);
        Ok(taken)
    }

    /// The whole vector, if it is one of these elements and no other buffer has any of it.
    pub fn into_vec<T: Element>(self) -> Option<Vec<T>> {
        let vec = Arc::into_inner(self.vec)?.vec.downcast::<Vec<T>>();
        vec.ok().map(|vec| *vec)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are in the region's vector, which lives as long as this buffer, and are initialised. They are in no
        // other buffer, so whoever writes to them has this one borrowed mutably.
        unsafe { std::slice::from_raw_parts(self.vec.base.add(self.start), self.num_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; this buffer is borrowed mutably, so nobody else reads or writes. All bit patterns are elements.
        unsafe { std::slice::from_raw_parts_mut(self.vec.base.add(self.start), self.num_bytes) }
    }
}

/// Buffers to be used again.
#[derive(Default)]
pub(super) struct Pool(Vec<Buffer>);

impl Pool {
    /// A buffer with whatever in it.
    pub fn take(&mut self, num_bytes: usize) -> Buffer {
        let known = (self.0.iter()).rposition(|buffer| buffer.num_bytes == num_bytes);
        match known {
            Some(index) => self.0.swap_remove(index),
            None => Buffer::zeros(num_bytes),
        }
    }

    /// Keeps a buffer, unless it is part of something else.
    pub fn give_back(&mut self, buffer: Buffer) {
        if Arc::strong_count(&buffer.vec) == 1 {
            self.0.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::bytes;

    #[test]
    fn parts_are_written_from_several_threads_and_joined() {
        let mut rest = Buffer::new(vec![0u32; 10]);
        let mut parts = [12, 0, 20].map(|num_bytes| rest.take(num_bytes).unwrap());
        assert!(rest.take(9).is_err() && rest.take(usize::MAX).is_err());
        std::thread::scope(|scope| {
            for (i, part) in parts.iter_mut().enumerate() {
                scope.spawn(move || bytes::elements_mut(part).fill(i as u32 + 1));
            }
        });
        assert_eq!(bytes::elements::<u32>(&parts[2]), [3; 5]);
        assert_eq!(rest.len(), 8);
        drop(parts);
        let whole = rest.into_vec::<u32>();
        assert_eq!(whole, Some(vec![1, 1, 1, 3, 3, 3, 3, 3, 0, 0]));
    }

    #[test]
    fn a_vector_comes_back_when_nobody_else_has_a_part_of_it() {
        let mut whole = Buffer::new(vec![0u32; 3]);
        let part = whole.take(4).unwrap();
        assert!(whole.into_vec::<u32>().is_none());
        assert!(part.into_vec::<u32>().is_some_and(|vec| vec.len() == 3));
        let other = Buffer::new(vec![0u32; 3]).into_vec::<i64>();
        assert!(other.is_none(), "other elements");
    }

    #[test]
    fn buffers_are_used_again() {
        let mut pool = Pool::default();
        let (seven, mut eight) = (pool.take(7), pool.take(8));
        assert_eq!((seven.len(), eight.len()), (7, 8));
        let none = eight.take(0).unwrap();
        let place = eight.as_ptr();
        pool.give_back(none);
        pool.give_back(eight);
        pool.give_back(seven);
        assert_eq!(pool.take(8).as_ptr(), place);
        assert_ne!(pool.take(0).as_ptr(), place, "a part of another one");
        assert_eq!(bytes::elements::<f64>(&pool.take(8)), [0.]);
    }
}
