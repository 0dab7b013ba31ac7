//! One rank per process: from MPI_Init to MPI_Finalize.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, scope};
use std::time::Duration;

use candle_core::Device;

use candle_launch::{RankEnv, SpokenWait, THREADS_HINT, WaitNotices};

use super::Result;
use super::communicator::MpiCommunicator;
use super::context::{Context, Shared};
use super::engine::{End, Engine, Job};
use super::environment::{
    cores_id, idle_cores, num_online_cores, said_world_size, threads_per_rank,
};
use super::group::MpiGroup;
use super::sys::{Mpi, size};
use crate::cores::{catch_panic, keep_candle_from_threads, num_cores, panic_message, pool_of_rank};
use crate::launch::words_of_failed;
use crate::{Error, ProcessGroup, message_of};

/// How long MPI may take to end all ranks before this one ends by itself, which makes its launcher end the others.
const ABORT_GRACE: Duration = Duration::from_secs(5);

/// How this process takes part in a run under MPI; see [`launch::mpi`](crate::launch::mpi).
#[derive(Debug, Clone)]
pub struct MpiConfig {
    /// How long one wait may last before it becomes an error, also that of a rank that has returned for those that have not.
    /// Default: 10 minutes.
    pub deadline: Duration,
    /// Threads on which this rank computes. Default: RAYON_NUM_THREADS, or else the cores that this process may use,
    /// divided over the ranks on this host that may use the same ones; at least one.
    pub threads_per_rank: Option<usize>,
    /// Takes every so many ranks in a row for those of one host, so that what ranks do on several hosts can be tried on one.
    /// Default: those that share memory, as MPI says.
    pub ranks_per_host: Option<usize>,
    /// The exit code of a rank that failed; it may be changed while the rank runs. Default: 1.
    pub failure_exit_code: Arc<AtomicU8>,
}

impl Default for MpiConfig {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(600),
            threads_per_rank: None,
            ranks_per_host: None,
            failure_exit_code: Arc::new(AtomicU8::new(1)),
        }
    }
}

/// Runs `run` as this process's rank of a run that `mpirun`, or another launcher that knows MPI, has started, with the CPU
/// as its device, and returns what it returns. It can be called once per process.
///
/// The rank runs inside a rayon pool of its own, on a thread named `rank-N`. The calling thread makes all calls to MPI, so
/// operations progress while the rank computes; it sleeps while nothing is under way.
///
/// Results equal those of [`threads`](crate::launch::threads) bit for bit: MPI moves the bytes, and the reductions
/// are ours, in the same order.
///
/// # Errors
/// Before the ranks have met: MPI cannot be initialised, or this process is the only rank although its launcher says that
/// there are more. Later errors have to reach all ranks: if `run` fails or panics, this prints `rank N failed: ..` on
/// standard error and ends all ranks by `MPI_Abort`, so it does not return.
pub fn mpi<T: Send>(
    config: MpiConfig,
    run: impl FnOnce(ProcessGroup) -> candle_core::Result<T> + Send,
) -> candle_core::Result<T> {
    // Before MPI starts threads.
    if RankEnv::from_env().is_ok_and(|env| env.local_world_size() > 1) {
        keep_candle_from_threads();
    }
    let exit_code = &config.failure_exit_code;
    let (ctx, world, threads) = begin(&config)?;
    let threads = config.threads_per_rank.unwrap_or(threads);
    let (jobs, received) = channel();
    let end = jobs.clone();
    let communicator = MpiCommunicator {
        shared: ctx.shared.clone(),
        jobs,
        group: world.clone(),
    };
    let rank = ctx.shared.world_rank;
    scope(|scope| {
        let rank_main = move || {
            let outcome = run_rank(communicator, threads, run);
            let value = outcome.unwrap_or_else(|message| fail(rank, &message, (&end, exit_code)));
            // If it cannot be sent, MPI's thread says why.
            drop(end.send(Job::End));
            value
        };
        // Not in the caller's pool, if that is in one.
        let handle = match Builder::new().spawn_scoped(scope, rank_main) {
            Ok(handle) => handle,
            Err(error) => {
                let message = format!("its thread could not be started: {error}\n{THREADS_HINT}");
                say_failed(rank, &message);
                abort(&ctx, exit_code)
            }
        };
        run_engine((ctx, exit_code), world, received);
        let value = handle.join();
        value.map_err(|panic| candle_core::Error::msg(panic_message(&*panic)))
    })
}

/// Prints why this rank failed and ends all ranks.
fn fail(rank: usize, message: &str, (jobs, exit_code): (&Sender<Job>, &AtomicU8)) -> ! {
    say_failed(rank, message);
    // If it cannot be sent, MPI's thread has come to the same end.
    if jobs.send(Job::Abort).is_ok() {
        std::thread::sleep(ABORT_GRACE);
    }
    std::process::exit(exit_code.load(Ordering::Relaxed).into())
}

/// Ends all ranks, from MPI's thread.
fn abort(ctx: &Context, exit_code: &AtomicU8) -> ! {
    let exit_code = exit_code.load(Ordering::Relaxed).into();
    ctx.mpi.abort(exit_code);
    // It has returned. A process that ends without MPI_Finalize makes its launcher end the others.
    std::process::exit(exit_code)
}

/// Prints why a rank failed, unless another one does. In one piece, as other processes write to the same terminal.
fn say_failed(rank: usize, message: &str) {
    if let Some(words) = words_of_failed(rank, message) {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), words.as_bytes());
    }
}

/// Initialises MPI and looks around.
fn begin(config: &MpiConfig) -> Result<(Context, Arc<MpiGroup>, usize)> {
    let wait = SpokenWait::begin(
        WaitNotices::default(),
        &format!("process {}", std::process::id()),
    );
    wait.say("in MPI_Init for the other ranks".to_string());
    let mpi = Mpi::init()?;
    drop(wait);
    let (world_rank, world_size) = (mpi.rank()?, size(mpi.world())?);
    if world_size == 1
        && let Some((name, said)) = said_world_size(|name| std::env::var(name).ok())
        && said > 1
    {
        let message = format!(
            "MPI says that this process is its only rank, but {name}={said}\n\
             hint: start the program by the mpirun of the MPI library that it was built with, or by a launcher that speaks \
             its process management interface (Slurm: srun --mpi=pmix or --mpi=pmi2)"
        );
        mpi.finalize()?;
        return Err(Error::Argument(message));
    }
    let (cores, host) = (cores_id(), mpi.host()?);
    let on_host = mpi.gather(host, [cores, world_rank as u64])?;
    mpi.free(host)?;
    // A host is known by its lowest rank.
    let lowest = on_host[0][1];
    let said = mpi.gather(mpi.world(), [lowest])?;
    let host_of: Vec<usize> = match config.ranks_per_host {
        Some(ranks_per_host) => (0..world_size)
            .map(|rank| rank / ranks_per_host.max(1))
            .collect(),
        None => said.iter().map(|[lowest]| *lowest as usize).collect(),
    };
    let threads = match std::env::var_os("RAYON_NUM_THREADS") {
        // It is each process's own.
        Some(_) => num_cores(),
        None => {
            let on_host: Vec<u64> = on_host.iter().map(|said| said[0]).collect();
            threads_per_rank(num_cores(), cores, &on_host)
        }
    };
    if world_rank == 0
        && std::env::var_os("RAYON_NUM_THREADS").is_none()
        && let Some(num_online) = num_online_cores()
        && let Some(warning) = idle_cores(threads, on_host.len(), num_online)
    {
        tracing::warn!("{warning}");
    }
    let world = MpiGroup::world(world_rank, &host_of);
    let shared = Shared::new((world_rank, world_size), config.deadline, mpi.max_tag()?);
    let shared = Arc::new(shared);
    Ok((Context { mpi, shared }, Arc::new(world), threads))
}

/// Does the work of MPI's thread, and ends MPI; with it all ranks, if this one fails.
fn run_engine((ctx, exit_code): (Context, &AtomicU8), world: Arc<MpiGroup>, jobs: Receiver<Job>) {
    let rank = ctx.shared.world_rank;
    let work = || Engine::new(&ctx, world, jobs)?.run();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(End::Done(num_undelivered))) => {
            if num_undelivered > 0 {
                tracing::warn!(
                    "{num_undelivered} messages were sent to rank {rank}, which never received them"
                );
            }
            // After a failure MPI is gone, and cannot end the others.
            if let Err(error) = ctx.mpi.finalize() {
                say_failed(rank, &error.to_string());
                std::process::exit(1)
            }
        }
        Ok(Ok(End::Failed)) => abort(&ctx, exit_code),
        Ok(Err(error)) => {
            say_failed(rank, &error.to_string());
            abort(&ctx, exit_code)
        }
        // MPI's state is gone, and nobody could say it to the rank, which may wait.
        Err(panic) => {
            let message = panic_message(&*panic);
            say_failed(rank, &format!("MPI's thread panicked: {message}"));
            std::process::exit(1)
        }
    }
}

/// Runs the rank in a pool of its own; on failure its message.
fn run_rank<T: Send>(
    world: MpiCommunicator,
    num_threads: usize,
    run: impl FnOnce(ProcessGroup) -> candle_core::Result<T> + Send,
) -> std::result::Result<T, String> {
    let rank = world.shared.world_rank;
    let group = ProcessGroup::new(Box::new(world));
    let pool = pool_of_rank(rank, num_threads, &Device::Cpu)
        .map_err(|error| format!("its threads could not be started: {error}\n{THREADS_HINT}"))?;
    let outcome = pool.install(|| catch_panic(|| run(group)));
    outcome.map_err(|error| message_of(&error))
}
