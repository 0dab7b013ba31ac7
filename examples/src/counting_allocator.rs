//! How much memory a program has asked for, without what its allocator keeps in reserve.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Smaller blocks are not counted: they are many, and all together they are little.
const MIN_SIZE: usize = 4096;

/// For `#[global_allocator]`: counts the bytes of blocks of 4 KiB or more that `A` has given and not got back.
pub struct CountingAllocator<A>(pub A);

/// The most bytes that were allocated at a time; 0 unless the program's allocator is a [`CountingAllocator`].
pub fn peak_allocated_bytes() -> usize {
    PEAK.load(Ordering::Relaxed)
}

fn gained(size: usize) {
    if size >= MIN_SIZE {
        let live = LIVE.fetch_add(size, Ordering::Relaxed) + size;
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

fn lost(size: usize) {
    if size >= MIN_SIZE {
        LIVE.fetch_sub(size, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to `A` as it came, and every block is the one that `A` gave; counting allocates nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let block = unsafe { self.0.alloc(layout) };
        if !block.is_null() {
            gained(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let block = unsafe { self.0.alloc_zeroed(layout) };
        if !block.is_null() {
            gained(layout.size());
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        let moved = unsafe { self.0.realloc(block, layout, new_size) };
        if !moved.is_null() {
            gained(new_size);
            lost(layout.size());
        }
        moved
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        lost(layout.size());
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(block, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::{CountingAllocator, LIVE, peak_allocated_bytes};
    use std::alloc::System;
    use std::sync::atomic::Ordering;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);

    /// The only test of this program that counts, and large beside what its harness allocates meanwhile.
    #[test]
    fn blocks_count_while_they_live_however_they_came_and_grew() {
        const SIZE: usize = 64 << 20;
        const SLACK: usize = 1 << 20;
        let live = || LIVE.load(Ordering::Relaxed);
        let before = live();
        let mut grown: Vec<u8> = Vec::with_capacity(SIZE / 2);
        grown.reserve_exact(SIZE);
        let zeroed = vec![0u64; SIZE / 8];
        let gained = live() - before;
        assert!(gained.abs_diff(2 * SIZE) < SLACK, "{gained}");
        drop((grown, zeroed));
        assert!(live().abs_diff(before) < SLACK);
        assert!(peak_allocated_bytes() >= before + 2 * SIZE);
        let refused = Vec::<u8>::new().try_reserve(isize::MAX as usize);
        assert!(refused.is_err() && live().abs_diff(before) < SLACK);
    }
}
