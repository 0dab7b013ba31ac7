//! How much memory a program and each of its ranks have asked for, without what its allocator keeps in reserve.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use candle_comm::{MIN_ADOPTED_BYTES, allocated_of_rank};
use candle_parallel::count_memory_with;
use candle_trainer::LESS_MEMORY_HINT;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Neither made on first use nor dropped: an allocator may not allocate.
    static OF_THREAD: Cell<i64> = const { Cell::new(0) };
}

/// Smaller blocks are not counted: they are many, and all together they are little.
const MIN_SIZE: usize = MIN_ADOPTED_BYTES;

/// For `#[global_allocator]`: counts the bytes of blocks of 4 KiB or more that `A` has given and not got back.
pub struct CountingAllocator<A>(pub A);

/// Bytes that the threads of the calling rank have been given, less those that they gave back, whoever had asked for them; outside of a rank those
/// of the thread.
pub fn rank_allocated_bytes() -> i64 {
    allocated_of_rank().map_or_else(|| OF_THREAD.get(), |bytes| bytes.load(Ordering::Relaxed))
}

fn add_to_rank(size: i64) {
    match allocated_of_rank() {
        Some(bytes) => {
            bytes.fetch_add(size, Ordering::Relaxed);
        }
        None => OF_THREAD.set(OF_THREAD.get() + size),
    }
}

/// Bytes that the process has been given and not given back.
pub(crate) fn allocated_bytes() -> i64 {
    LIVE.load(Ordering::Relaxed) as i64
}

/// The most bytes that were allocated at a time; 0 unless the program's allocator is a [`CountingAllocator`].
pub fn peak_allocated_bytes() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Lets `bytes` measure activations, if the program's allocator is a [`CountingAllocator`], which has counted something long before.
pub(crate) fn measure_activations_by(bytes: fn() -> i64) {
    if peak_allocated_bytes() > 0 {
        count_memory_with(bytes);
    }
}

/// Says once that there is no memory, before whoever asked for it ends the process, as nearly all do. Nothing is allocated for it, and the lock
/// of stderr is not taken: who waits for memory may hold it.
fn refused(size: usize) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    if !IS_TOLD.swap(true, Ordering::Relaxed) {
        let mut line = [0; 1024];
        let mut rest = &mut line[..];
        // It fits.
        let _ = writeln!(
            rest,
            "error: there is no memory for {size} bytes, beside {} that are held\n{LESS_MEMORY_HINT}",
            LIVE.load(Ordering::Relaxed)
        );
        let num_left = rest.len();
        let num_bytes = line.len() - num_left;
        // SAFETY: the file is never dropped, so its descriptor stays open for others.
        let mut stderr = ManuallyDrop::new(unsafe { File::from_raw_fd(2) });
        // There is nobody else to tell.
        let _ = stderr.write_all(&line[..num_bytes]);
    }
}

/// Counts a block that was given, or says that it was not.
fn given(block: *mut u8, size: usize) -> *mut u8 {
    match block.is_null() {
        true => refused(size),
        false => gained(size),
    }
    block
}

fn gained(size: usize) {
    if size >= MIN_SIZE {
        let live = LIVE.fetch_add(size, Ordering::Relaxed) + size;
        PEAK.fetch_max(live, Ordering::Relaxed);
        add_to_rank(size as i64);
    }
}

fn lost(size: usize) {
    if size >= MIN_SIZE {
        LIVE.fetch_sub(size, Ordering::Relaxed);
        add_to_rank(-(size as i64));
    }
}

// SAFETY: every call goes to `A` as it came, and every block is the one that `A` gave; counting allocates nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        given(unsafe { self.0.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        given(unsafe { self.0.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        let moved = unsafe { self.0.realloc(block, layout, new_size) };
        match moved.is_null() {
            true => refused(new_size),
            false => {
                gained(new_size);
                lost(layout.size());
            }
        }
        moved
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        lost(layout.size());
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(block, layout) }
    }
}

/// Of those who look at the peak.
static ALONE: Mutex<()> = Mutex::new(());

/// The most bytes that this program, whose allocator is a [`CountingAllocator`], allocates at a time during `work`, beside those before;
/// `work` of others waits. [`peak_allocated_bytes`] begins anew.
pub fn peak_bytes_of(work: impl FnOnce()) -> usize {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    peak_allocated_bytes() - before
}

#[cfg(test)]
mod tests {
    use super::{ALONE, peak_allocated_bytes, rank_allocated_bytes};

    /// The allocator of this program is that of `allocator.rs`.
    #[test]
    fn blocks_count_on_their_thread_while_they_live_however_they_came_and_grew() {
        const SIZE: usize = 64 << 20;
        let _alone = ALONE.lock().unwrap();
        let before = rank_allocated_bytes();
        let gained = || rank_allocated_bytes() - before;
        let mut grown: Vec<u8> = Vec::with_capacity(SIZE / 2);
        grown.reserve_exact(SIZE);
        let zeroed = vec![0u64; SIZE / 8];
        assert_eq!(gained(), 2 * SIZE as i64);
        assert!(peak_allocated_bytes() >= 2 * SIZE);
        let of_other = std::thread::spawn(move || {
            drop(zeroed);
            rank_allocated_bytes()
        });
        assert_eq!(of_other.join().unwrap(), -(SIZE as i64));
        assert_eq!(gained(), 2 * SIZE as i64);
        drop(grown);
        assert_eq!(gained(), SIZE as i64);
        let refused = Vec::<u8>::new().try_reserve(isize::MAX as usize);
        assert!(refused.is_err());
        assert_eq!(gained(), SIZE as i64);
    }
}
