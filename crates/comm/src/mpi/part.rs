//! A vector cut into parts that are owned one by one, so that some are with MPI while others are read or written here.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The memory of a vector whose [`Part`]s are handed out.
pub(super) struct Region<T> {
    base: *mut T,
    len: usize,
    capacity: usize,
}

// SAFETY: a region owns its vector as a `Vec<T>` does. Its elements are reached through parts only, which overlap nowhere.
unsafe impl<T: Send> Send for Region<T> {}
// SAFETY: a shared region gives access to nothing: see above.
unsafe impl<T: Send> Sync for Region<T> {}

impl<T: Copy> Region<T> {
    /// Cuts `vec` into parts of these lengths from its start on; `None` if it is shorter than them.
    pub fn cut(vec: Vec<T>, lens: &[usize]) -> Option<(Arc<Self>, Vec<Part<T>>)> {
        let mut vec = ManuallyDrop::new(vec);
        let region = Arc::new(Self {
            base: vec.as_mut_ptr(),
            len: vec.len(),
            capacity: vec.capacity(),
        });
        let mut start = 0usize;
        let mut parts = Vec::with_capacity(lens.len());
        for &len in lens {
            let end = start.checked_add(len).filter(|end| *end <= region.len)?;
            parts.push(Part {
                region: region.clone(),
                start,
                len,
            });
            start = end;
        }
        Some((region, parts))
    }

    /// The vector, if no part is left.
    pub fn into_vec(self: Arc<Self>) -> Option<Vec<T>> {
        let region = ManuallyDrop::new(Arc::into_inner(self)?);
        // SAFETY: these came from a vector, which nobody else frees: `region` is not dropped.
        Some(unsafe { Vec::from_raw_parts(region.base, region.len, region.capacity) })
    }
}

impl<T> Drop for Region<T> {
    fn drop(&mut self) {
        // SAFETY: as in `into_vec`; the last part is gone, as each holds the region.
        drop(unsafe { Vec::from_raw_parts(self.base, self.len, self.capacity) });
    }
}

/// Some elements of a [`Region`], owned: no other part has any of them.
pub(super) struct Part<T> {
    region: Arc<Region<T>>,
    start: usize,
    len: usize,
}

impl<T> Deref for Part<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the elements are in the region's vector, which lives as long as this part, and are initialised. They are
        // in no other part, so whoever writes to them has this one borrowed mutably.
        unsafe { std::slice::from_raw_parts(self.region.base.add(self.start), self.len) }
    }
}

impl<T> DerefMut for Part<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; this part is borrowed mutably, so nobody else reads or writes.
        unsafe { std::slice::from_raw_parts_mut(self.region.base.add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_written_from_several_threads_and_joined() {
        let (region, mut parts) = Region::cut(vec![0u32; 10], &[3, 0, 5, 2]).unwrap();
        std::thread::scope(|scope| {
            for (i, part) in parts.iter_mut().enumerate() {
                scope.spawn(move || part.fill(i as u32 + 1));
            }
        });
        assert_eq!(parts[2][..], [3; 5]);
        let region = {
            let kept = parts.pop();
            drop(parts);
            assert!(
                region.clone().into_vec().is_none(),
                "a part and a region are left"
            );
            drop(kept);
            region
        };
        assert_eq!(region.into_vec().unwrap(), [1, 1, 1, 3, 3, 3, 3, 3, 4, 4]);
    }

    #[test]
    fn more_than_there_is_cannot_be_cut() {
        assert!(Region::cut(vec![0u8; 4], &[3, 2]).is_none());
        assert!(Region::cut(vec![0u8; 4], &[1, usize::MAX]).is_none());
        assert!(Region::cut(Vec::<u8>::new(), &[0, 0]).is_some());
    }
}
