//! The allocator of the programs, which each of them declares: a library must not choose one for others.
//!
//! Training frees and allocates the same large buffers each step. The system's allocator gives such memory back at once and
//! the next step pays a page fault for every page of it; this one keeps it.

#![allow(unsafe_code)]

use std::ffi::c_long;

use mimalloc::MiMalloc;

use crate::memory::counting_allocator::CountingAllocator;

/// mimalloc, counted.
pub type Allocator = CountingAllocator<MiMalloc>;

/// For `#[global_allocator]`.
pub const ALLOCATOR: Allocator = CountingAllocator(MiMalloc);

/// `mi_option_purge_delay` in `mi_option_e` of mimalloc.h, versions 2 and 3.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
/// Values of the purge delay that mean: never, and after so many milliseconds: at once would have each buffer of a step zeroed anew.
const NEVER: c_long = -1;
const SOON: c_long = 30;

/// Gives the system the memory that building a model has left free, and lets the process keep what it frees from now on, in training. By
/// default that goes back too after a second, and a step that takes about as long finds its buffers gone: 1,800 faults, each
/// the zeroing of 2 MiB, in a step of the default benchmark.
pub fn keep_freed_memory() {
    // SAFETY: the option exists, takes a number of milliseconds, and may be set at any time, as what is free may be given back.
    unsafe {
        libmimalloc_sys::mi_collect(true);
        libmimalloc_sys::mi_option_set(PURGE_DELAY, NEVER);
    }
}

/// Has the process give back what it frees soon, for runs that keep in files what would not fit: their buffers have many sizes, and what is free
/// of them would stay beside what is used.
pub fn return_freed_memory() {
    // SAFETY: as above.
    unsafe {
        libmimalloc_sys::mi_option_set(PURGE_DELAY, SOON);
        libmimalloc_sys::mi_collect(true);
    }
}

#[cfg(test)]
mod tests {
    use super::{Allocator, NEVER, PURGE_DELAY, SOON, keep_freed_memory, return_freed_memory};

    #[global_allocator]
    static ALLOCATOR: Allocator = super::ALLOCATOR;

    /// The option's number is not in the bindings: find it by the default that mimalloc documents.
    #[test]
    fn the_option_set_is_the_purge_delay() {
        // SAFETY: reading an option has no other effect.
        let value = || unsafe { libmimalloc_sys::mi_option_get(PURGE_DELAY) };
        let milliseconds = value();
        assert!(
            milliseconds == 1000 || milliseconds == NEVER,
            "{milliseconds}"
        );
        keep_freed_memory();
        assert_eq!(value(), NEVER);
        return_freed_memory();
        assert_eq!(value(), SOON);
    }
}
