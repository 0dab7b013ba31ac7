//! The cores of this machine, and the threads on which ranks compute.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicI64;
use std::sync::{Once, OnceLock};

use candle_core::{Device, Result, bail};
use candle_launch::THREADS_HINT;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::error::argument;
use crate::memory::adopted::allocate_for;
use crate::memory::device::make_current;

/// How many threads candle has for large elementwise operations, all ranks of a process together.
const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";

/// The stack of each of a rank's threads: candle walks and drops graphs recursively. Memory is used as it grows only.
const STACK_BYTES: usize = 64 << 20;

/// Threads that compute at once: RAYON_NUM_THREADS, or the cores that this process may use. Nothing is started to find out.
pub(crate) fn num_cores() -> usize {
    let wanted = std::env::var("RAYON_NUM_THREADS").ok();
    let wanted = wanted.and_then(|number| number.parse().ok());
    wanted
        .filter(|number| *number > 0)
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// Starts the threads on which this process computes outside of ranks, rayon's own, if nobody has. The first operation that needs
/// them does so too, and panics where the system has no threads.
///
/// # Errors
/// The system has no more threads.
pub fn start_threads() -> Result<()> {
    /// Why there are none: it is tried once.
    static REFUSED: OnceLock<Option<String>> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return Ok(());
    }
    let start = || {
        let error = ThreadPoolBuilder::new().build_global().err()?;
        // Without a source they are there already.
        std::error::Error::source(&error).map(ToString::to_string)
    };
    match REFUSED.get_or_init(start) {
        Some(error) => bail!("no threads to compute on: {error}\n{THREADS_HINT}"),
        None => Ok(()),
    }
}

/// A rank's own threads. What it drops there is freed on its device.
pub(crate) fn pool_of_rank(
    rank: usize,
    num_threads: usize,
    device: &Device,
) -> std::result::Result<ThreadPool, ThreadPoolBuildError> {
    let device = device.clone();
    // Eight bytes of each pool stay, as blocks of memory outlive it.
    let allocated: &'static AtomicI64 = Box::leak(Box::default());
    ThreadPoolBuilder::new()
        .num_threads(num_threads.max(1))
        .thread_name(move |_| format!("rank-{rank}"))
        .stack_size(STACK_BYTES)
        .start_handler(move |_| {
            allocate_for(allocated);
            // If it fails it does so on the rank's main thread too, which says it.
            drop(make_current(&device));
        })
        .build()
}

/// Where ranks share cores, keeps candle from starting threads of its own for large elementwise operations: the ranks would take
/// them in turns, and spin while they have no core. What is set by CANDLE_NUM_THREADS stays as it is.
///
/// candle reads the number when it first needs the threads, from the environment only, which may be changed as long as this
/// thread is the only one. Later, a warning says what to set.
pub(crate) fn keep_candle_from_threads() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os(CANDLE_THREADS).is_some() || candle_core::utils::get_num_threads() == 1 {
            return;
        }
        if is_only_thread() && set_candle_threads() {
            return;
        }
        tracing::warn!(
            "blocks made of candle's own operations will be slow: the ranks share candle's {} threads, which spin; set \
             {CANDLE_THREADS}=1",
            candle_core::utils::get_num_threads()
        );
    });
}

/// Whether nobody can look at the environment meanwhile.
fn is_only_thread() -> bool {
    let threads = std::fs::read_dir("/proc/self/task");
    threads.is_ok_and(|threads| threads.count() == 1)
}

/// Makes candle do without threads; returns whether it does. To be called while there is one thread.
#[allow(unsafe_code)]
fn set_candle_threads() -> bool {
    // SAFETY: the caller's thread is the only one, so nobody reads the environment.
    unsafe { std::env::set_var(CANDLE_THREADS, "1") };
    let num_workers = candle_core::utils::barrier_pool().n_workers();
    if num_workers == 0 {
        // Child processes may be alone on their cores. SAFETY: as above; no thread was started.
        unsafe { std::env::remove_var(CANDLE_THREADS) };
    }
    num_workers == 0
}

/// Runs a rank; that it panics is an error. What it leaves behind then is never looked at.
pub(crate) fn catch_panic<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let panic = panic_message(&*panic);
        Err(argument(format!("panicked: {panic}")))
    })
}

/// What a panic says.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    if let Some(message) = panic.downcast_ref::<&str>() {
        message
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message
    } else {
        "(a value that is not a message)"
    }
}
