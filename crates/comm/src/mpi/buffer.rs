//! Memory that MPI reads and writes: vectors, whole or cut into parts that are owned one by one, so that some are with MPI while
//! others are read or written here.
#![allow(unsafe_code)]

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::Result;
use crate::Error;
use crate::element::Element;

/// A vector whose memory is handed out as [`Buffer`]s.
pub(super) struct Region {
    vec: Box<dyn Any + Send + Sync>,
    base: *mut u8,
    num_bytes: usize,
}

// SAFETY: a region owns its vector. Its elements are reached through buffers only, which overlap nowhere.
unsafe impl Send for Region {}
// SAFETY: a shared region gives access to nothing: see above.
unsafe impl Sync for Region {}

impl Region {
    fn new<T: Element>(mut vec: Vec<T>) -> Arc<Self> {
        Arc::new(Self {
            base: vec.as_mut_ptr().cast(),
            num_bytes: size_of_val(&*vec),
            vec: Box::new(vec),
        })
    }

    /// Cuts `vec` into buffers of so many elements, from its start on; an error if it is shorter than they are.
    pub fn cut<T: Element>(vec: Vec<T>, lens: impl IntoIterator<Item = usize>) -> Result<Cut> {
        let region = Self::new(vec);
        let (mut start, mut buffers) = (0usize, Vec::new());
        for len in lens {
            let num_bytes = len.saturating_mul(size_of::<T>());
            let end = start.saturating_add(num_bytes);
            if end > region.num_bytes {
                let message = "parts of a vector are longer than the vector";
                return Err(Error::Backend(message.into()));
            }
            buffers.push(Buffer {
                region: region.clone(),
                start,
                num_bytes,
            });
            start = end;
        }
        Ok((region, buffers))
    }

    /// The vector, if it is one of these elements and no buffer is left.
    pub fn into_vec<T: Element>(self: Arc<Self>) -> Option<Vec<T>> {
        let vec = Arc::into_inner(self)?.vec.downcast::<Vec<T>>();
        vec.ok().map(|vec| *vec)
    }
}

/// A region, and all of its buffers.
pub(super) type Cut = (Arc<Region>, Vec<Buffer>);

/// Some bytes of a [`Region`], owned: no other buffer has any of them, and they stay in place when it is moved.
pub(super) struct Buffer {
    region: Arc<Region>,
    start: usize,
    num_bytes: usize,
}

impl Buffer {
    /// All of `vec`.
    pub fn new<T: Element>(vec: Vec<T>) -> Self {
        let region = Region::new(vec);
        Self {
            start: 0,
            num_bytes: region.num_bytes,
            region,
        }
    }

    /// New memory, for elements of any type.
    pub fn zeros(num_bytes: usize) -> Self {
        // Aligned for all of them.
        let whole = Self::new(vec![0i64; num_bytes.div_ceil(size_of::<i64>())]);
        Self { num_bytes, ..whole }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are in the region's vector, which lives as long as this buffer, and are initialised. They are in no
        // other buffer, so whoever writes to them has this one borrowed mutably.
        unsafe { std::slice::from_raw_parts(self.region.base.add(self.start), self.num_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; this buffer is borrowed mutably, so nobody else reads or writes. All bit patterns are elements.
        unsafe { std::slice::from_raw_parts_mut(self.region.base.add(self.start), self.num_bytes) }
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

    pub fn give_back(&mut self, buffer: Buffer) {
        self.0.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes;

    #[test]
    fn buffers_are_written_from_several_threads_and_joined() {
        let (region, mut buffers) = Region::cut(vec![0u32; 10], [3, 0, 5, 2]).unwrap();
        std::thread::scope(|scope| {
            for (i, buffer) in buffers.iter_mut().enumerate() {
                scope.spawn(move || bytes::elements_mut(buffer).fill(i as u32 + 1));
            }
        });
        assert_eq!(bytes::elements::<u32>(&buffers[2]), [3; 5]);
        let kept = buffers.pop();
        drop(buffers);
        assert!(
            region.clone().into_vec::<u32>().is_none(),
            "a buffer and a region are left"
        );
        drop(kept);
        let expected = [1, 1, 1, 3, 3, 3, 3, 3, 4, 4];
        assert_eq!(region.into_vec::<u32>().unwrap(), expected);
    }

    #[test]
    fn more_than_there_is_cannot_be_cut() {
        assert!(Region::cut(vec![0u8; 4], [3, 2]).is_err());
        assert!(Region::cut(vec![0u8; 4], [1, usize::MAX]).is_err());
        assert!(Region::cut(vec![0f64; 4], [1, usize::MAX / 4]).is_err());
        assert!(Region::cut(Vec::<u8>::new(), [0, 0]).is_ok());
        let (region, _) = Region::cut(vec![0u8; 4], [4]).unwrap();
        assert!(region.into_vec::<u32>().is_none(), "other elements");
    }

    #[test]
    fn buffers_are_used_again() {
        let mut pool = Pool::default();
        let (seven, eight) = (pool.take(7), pool.take(8));
        let place = eight.as_ptr();
        assert_eq!((seven.len(), eight.len()), (7, 8));
        pool.give_back(eight);
        pool.give_back(seven);
        assert_eq!(pool.take(8).as_ptr(), place);
        assert_eq!(bytes::elements::<f64>(&pool.take(8)), [0.]);
    }
}
