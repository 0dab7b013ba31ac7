//! A grid of blocks of threads, run on the CPU.

use std::ffi::{CStr, c_char, c_void};

#[allow(unsafe_code)]
mod shim {
    use super::{c_char, c_void};

    unsafe extern "C" {
        pub fn shim_launch(
            grid: *const u32,
            block_size: u32,
            shared_bytes: usize,
            seed: u64,
            kernel: extern "C" fn(*const c_void),
            arguments: *const c_void,
        ) -> *const c_char;
    }
}

/// How a kernel is started; the kernels' README says what each expects.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [usize; 3],
    /// Threads of a block, whole warps.
    pub block: usize,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Of the order in which threads run.
    pub seed: u64,
}

impl Launch {
    /// `num_blocks` blocks of `block` threads with `shared_bytes` of shared memory.
    pub fn new(num_blocks: usize, block: usize, shared_bytes: usize) -> Self {
        Self {
            grid: [num_blocks, 1, 1],
            block,
            shared_bytes,
            seed: 1,
        }
    }

    /// Calls `kernel` in every thread of the grid.
    ///
    /// # Errors
    /// A sentence, when threads wait for each other in vain or wrote beyond the shared memory.
    #[allow(unsafe_code)]
    pub fn run<F: Fn()>(&self, kernel: F) -> Result<(), String> {
        extern "C" fn call<F: Fn()>(kernel: *const c_void) {
            // SAFETY: `run` passes the address of an F that outlives the launch.
            unsafe { (*kernel.cast::<F>())() }
        }
        let grid = self.grid.map(|blocks| blocks as u32);
        // SAFETY: `call` gets the kernel it was made for; the message is static or this thread's until its next launch.
        unsafe {
            let kernel: *const F = &kernel;
            let message = shim::shim_launch(
                grid.as_ptr(),
                self.block as u32,
                self.shared_bytes,
                self.seed,
                call::<F>,
                kernel.cast(),
            );
            match message.is_null() {
                true => Ok(()),
                false => Err(CStr::from_ptr(message).to_string_lossy().into_owned()),
            }
        }
    }
}
