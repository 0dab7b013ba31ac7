//! Keeps the threads of a pool awake between operations: to wake one that sleeps takes as long as many an operation of a small model.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a thread looks for work until it sleeps.
const PATIENCE: Duration = Duration::from_micros(300);
/// How long it stays at a time: work of its own that this is in the way of need not wait for the end of all other work.
const AT_MOST: Duration = Duration::from_millis(20);
/// Pauses of the processor from one look to the next.
const PAUSES: usize = 16;

thread_local! {
    /// Threads that this one keeps awake.
    static NUM_AWAKE: Arc<AtomicUsize> = Arc::default();
}

/// An operation begins, which may soon have work for the other threads of the current pool: these stay awake for a while, or wake up. To be
/// called by the thread that asks for operations, not from inside work that is shared out.
///
/// Does nothing outside of a pool, and in one with more threads than cores.
pub(crate) fn keep_pool_awake() {
    static NUM_CORES: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    // Outside of a pool the number of threads is that of the global one, which would be started to tell.
    let Some(caller) = rayon::current_thread_index() else {
        return;
    };
    let num_threads = rayon::current_num_threads();
    if num_threads == 1 || num_threads > *NUM_CORES {
        return;
    }
    NUM_AWAKE.with(|num_awake| {
        if num_awake.load(Ordering::Acquire) > 0 {
            return;
        }
        num_awake.store(num_threads - 1, Ordering::Release);
        let num_awake = num_awake.clone();
        rayon::spawn_broadcast(move |context| {
            if context.index() != caller {
                work_while_there_is_some();
                num_awake.fetch_sub(1, Ordering::AcqRel);
            }
        });
    });
}

/// Does what the pool has to do, until there has been nothing for a while.
fn work_while_there_is_some() {
    let start = Instant::now();
    let mut last_work = start;
    while last_work.elapsed() < PATIENCE && start.elapsed() < AT_MOST {
        match rayon::yield_now() {
            Some(rayon::Yield::Executed) => last_work = Instant::now(),
            _ => {
                (0..PAUSES).for_each(|_| spin_loop());
                // Whoever else wants the core has it.
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{NUM_AWAKE, PATIENCE, keep_pool_awake};
    use rayon::prelude::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    fn num_awake() -> usize {
        NUM_AWAKE.with(|num_awake| num_awake.load(Ordering::Acquire))
    }

    fn pool_of(num_threads: usize) -> rayon::ThreadPool {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads);
        pool.build().unwrap()
    }

    #[test]
    fn threads_stay_awake_while_there_is_work_and_then_sleep() {
        if std::thread::available_parallelism().map_or(1, std::num::NonZero::get) < 2 {
            return;
        }
        pool_of(2).install(|| {
            // The other thread works, so that it cannot have gone to sleep.
            let caller = rayon::current_thread_index().unwrap();
            let is_held = Arc::new(AtomicBool::new(true));
            let holds = is_held.clone();
            rayon::spawn_broadcast(move |context| {
                while context.index() != caller && holds.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
            });
            keep_pool_awake();
            assert_eq!(num_awake(), 1);
            is_held.store(false, Ordering::Release);
            // Work that is shared out meanwhile is done by both, whoever of them is awake.
            let sum: usize = (0..10_000usize).into_par_iter().map(|i| i % 7).sum();
            assert_eq!(sum, (0..10_000).map(|i| i % 7).sum::<usize>());
            let (start, limit) = (Instant::now(), Duration::from_secs(60));
            while num_awake() > 0 {
                assert!(start.elapsed() < limit, "a thread has not gone to sleep");
                std::thread::sleep(PATIENCE);
            }
        });
    }

    #[test]
    fn nobody_is_kept_awake_without_a_core_or_outside_of_a_pool() {
        keep_pool_awake();
        assert_eq!(num_awake(), 0);
        let num_cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        for num_threads in [1, num_cores + 1] {
            pool_of(num_threads).install(|| {
                keep_pool_awake();
                assert_eq!(num_awake(), 0);
            });
        }
    }
}
