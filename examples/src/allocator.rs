//! The allocator of every example program.
//!
//! Training frees and allocates the same large buffers each step. The system's allocator gives such memory back at once and
//! the next step pays a page fault for every 4 KiB of it; this one keeps it.

use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;
