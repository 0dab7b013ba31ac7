//! One rank per process: from MPI_Init to MPI_Finalize.

use std::any::Any;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle, scope};
use std::time::Duration;

use candle_core::{Device, Result};

use candle_launch::RankEnv;

use super::MpiConfig;
use super::communicator::{MpiCommunicator, Shared};
use super::context::LastCalls;
use super::context::{Context, Group};
use super::engine::{End, Engine, Job};
use super::environment::{
    cores_id, idle_cores, num_online_cores, said_world_size, threads_per_rank,
};
use super::hosts::Hosts;
use super::native::NativeGroup;
use super::sys::{Comm, Mpi};
use crate::cores::{keep_candle_from_threads, num_cores, panic_message, pool_of_rank};
use crate::launch::words_of_failed;
use crate::{Error, MpiReduction, ProcessGroup, message_of};

/// How long MPI may take to end all ranks before this one ends by itself, which makes its launcher end the others.
const ABORT_GRACE: Duration = Duration::from_secs(5);

/// What MPI's thread knows once MPI is initialised.
struct Start {
    world_rank: usize,
    world_size: usize,
    threads_per_rank: usize,
    last_calls: Arc<LastCalls>,
    max_tag: c_int,
    native: Option<NativeGroup>,
}

/// Runs `run` as this process's rank of a run that `mpirun`, or another launcher that knows MPI, has started, with the CPU
/// as its device, and returns what it returns. It can be called once per process.
///
/// The rank runs inside a rayon pool of its own, on a thread named `rank-N`. Another thread, `mpi`, makes all calls to MPI (but
/// for splits with [`MpiReduction::Native`](crate::MpiReduction)), so operations progress while the rank computes; it sleeps while
/// nothing is under way.
///
/// Results equal those of [`threads`](crate::launch::threads) bit for bit, unless MPI is asked for its own sums: it moves the bytes,
/// and the reductions are ours, in the same order.
///
/// # Errors
/// Before the ranks have met: MPI cannot be initialised, or this process is the only rank although its launcher says that
/// there are more. Later errors have to reach all ranks: if `run` fails or panics, this prints `rank N failed: ..` on
/// standard error and ends all ranks by `MPI_Abort`, so it does not return.
pub fn mpi<T: Send>(
    config: MpiConfig,
    run: impl FnOnce(ProcessGroup) -> Result<T> + Send,
) -> Result<T> {
    // Before MPI starts threads.
    if RankEnv::from_env().is_ok_and(|env| env.local_world_size() > 1) {
        keep_candle_from_threads();
    }
    let (jobs, received) = channel();
    let (engine, start) = start_engine(&config, received)?;
    let shared = Arc::new(Shared {
        world_rank: start.world_rank,
        deadline: config.deadline,
        last_calls: start.last_calls.clone(),
        jobs: jobs.clone(),
        num_groups: AtomicI64::new(1),
        max_tag: start.max_tag,
    });
    let rank = start.world_rank;
    let outcome = run_rank(&config, &start, shared, run);
    let value = match outcome {
        Ok(value) => value,
        Err(message) => fail(rank, &message, &jobs),
    };
    if jobs.send(Job::End).is_err() {
        fail(rank, "MPI's thread has ended before the rank", &jobs);
    }
    match engine.join() {
        Ok(Ok(num_undelivered)) => {
            if num_undelivered > 0 {
                tracing::warn!(
                    "{num_undelivered} messages were sent to rank {rank}, which never received them"
                );
            }
            Ok(value)
        }
        Ok(Err(error)) => fail(rank, &error.to_string(), &jobs),
        Err(panic) => fail(rank, panic_message(&*panic), &jobs),
    }
}

/// Prints why this rank failed and ends all ranks.
fn fail(rank: usize, message: &str, jobs: &Sender<Job>) -> ! {
    say_failed(rank, message);
    // If it cannot be sent, MPI's thread has come to the same end.
    if jobs.send(Job::Abort).is_ok() {
        std::thread::sleep(ABORT_GRACE);
    }
    std::process::exit(1)
}

/// Prints why a rank failed, unless another one does. In one piece, as other processes write to the same terminal.
fn say_failed(rank: usize, message: &str) {
    if let Some(words) = words_of_failed(rank, message) {
        eprint!("{words}");
    }
}

/// MPI's thread: at its end, the number of messages that nobody received.
type EngineThread = JoinHandle<std::result::Result<u64, Error>>;

/// Starts MPI's thread, which initialises MPI.
fn start_engine(config: &MpiConfig, jobs: Receiver<Job>) -> Result<(EngineThread, Start)> {
    let (started, start) = channel();
    let config = config.clone();
    let engine = Builder::new().name("mpi".into()).spawn(move || {
        let begun = begin(&config);
        match begun {
            Ok((context, start)) => {
                // The other end waits for it.
                drop(started.send(Ok(start)));
                let rank = context.world_rank;
                let ended = catch_unwind(AssertUnwindSafe(|| run_engine(context, jobs)));
                ended.unwrap_or_else(|panic| {
                    // Nobody could say it to the rank, which may wait; and MPI's state is gone. A process that ends without
                    // MPI_Finalize makes its launcher end the others.
                    let message = panic_message(&*panic);
                    say_failed(rank, &format!("MPI's thread panicked: {message}"));
                    std::process::exit(1)
                })
            }
            Err(error) => {
                drop(started.send(Err(error)));
                Ok(0)
            }
        }
    })?;
    match start.recv() {
        Ok(start) => Ok((engine, start?)),
        Err(_) => Err(Error::Backend("MPI's thread ended while MPI was initialised".into()).into()),
    }
}

/// Initialises MPI and looks around.
fn begin(config: &MpiConfig) -> std::result::Result<(Context, Start), Error> {
    let mpi = Mpi::init(config.reduction)?;
    let (world_rank, world_size) = (mpi.rank()?, mpi.size()?);
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
    let (own, host) = (cores_id(), mpi.host()?);
    let on_host = mpi.gather(host, own)?;
    // A host is known by its lowest rank.
    let lowest = mpi.gather(host, world_rank as u64)?[0];
    mpi.free(host)?;
    let host_of: Vec<usize> = match config.ranks_per_host {
        Some(ranks_per_host) => (0..world_size)
            .map(|rank| rank / ranks_per_host.max(1))
            .collect(),
        None => mpi
            .gather(mpi.world(), lowest)?
            .iter()
            .map(|rank| *rank as usize)
            .collect(),
    };
    let threads = match std::env::var_os("RAYON_NUM_THREADS") {
        // It is each process's own.
        Some(_) => num_cores(),
        None => threads_per_rank(num_cores(), own, &on_host),
    };
    if world_rank == 0
        && std::env::var_os("RAYON_NUM_THREADS").is_none()
        && let Some(num_online) = num_online_cores()
        && let Some(warning) = idle_cores(threads, on_host.len(), num_online)
    {
        tracing::warn!("{warning}");
    }
    let last_calls = Arc::new(LastCalls::new(world_rank, world_size));
    let native = native_world(&mpi, config.reduction)?;
    let world = Group {
        comm: Comm(0),
        members: (0..world_size).collect(),
        rank: world_rank,
        native,
        hosts: Arc::new(Hosts::new(&host_of)),
    };
    let max_tag = mpi.max_tag()?;
    let context = Context {
        mpi,
        world_rank,
        deadline: config.deadline,
        last_calls: last_calls.clone(),
        groups: vec![world],
    };
    let start = Start {
        world_rank,
        world_size,
        threads_per_rank: threads,
        last_calls,
        max_tag,
        native,
    };
    Ok((context, start))
}

/// Where the world adds by MPI, if it is to.
///
/// # Errors
/// The ranks disagree.
fn native_world(
    mpi: &Mpi,
    reduction: MpiReduction,
) -> std::result::Result<Option<NativeGroup>, Error> {
    let is_native = reduction == MpiReduction::Native;
    let all = mpi.gather(mpi.world(), u64::from(is_native))?;
    if let Some(other) = all.iter().position(|other| *other != all[0]) {
        let name = |is_native| match is_native {
            0 => MpiReduction::Exact,
            _ => MpiReduction::Native,
        };
        let (first, second) = (name(all[0]), name(all[other]));
        return Err(Error::Argument(format!(
            "ranks disagree about who adds over MPI: {first} on rank 0, {second} on rank {other}\n\
             hint: give all ranks the same flags (--mpi-reduction)"
        )));
    }
    is_native.then(|| NativeGroup::world(mpi)).transpose()
}

/// MPI's thread, from MPI_Init on: the number of messages that nobody received.
fn run_engine(context: Context, jobs: Receiver<Job>) -> std::result::Result<u64, Error> {
    let engine = Engine::new(context, jobs)?;
    let (context, end) = engine.run();
    match end {
        Ok(End::Done(num_undelivered)) => {
            context.mpi.finalize()?;
            Ok(num_undelivered)
        }
        Ok(End::Failed) => {
            context.mpi.abort(1);
            Err(Error::Backend("MPI_Abort has returned".into()))
        }
        Err(error) => {
            say_failed(context.world_rank, &error.to_string());
            context.mpi.abort(1);
            Err(error)
        }
    }
}

/// Runs the rank on a thread and in a pool of its own; on failure its message.
fn run_rank<T: Send>(
    config: &MpiConfig,
    start: &Start,
    shared: Arc<Shared>,
    run: impl FnOnce(ProcessGroup) -> Result<T> + Send,
) -> std::result::Result<T, String> {
    let rank = start.world_rank;
    let world = MpiCommunicator::world(shared, start.world_size, start.native);
    let group = ProcessGroup::new(Box::new(world));
    let num_threads = config.threads_per_rank.unwrap_or(start.threads_per_rank);
    let pool = pool_of_rank(rank, num_threads, &Device::Cpu)
        .map_err(|error| format!("its threads could not be started: {error}"))?;
    let message_of_panic =
        |panic: Box<dyn Any + Send>| format!("panicked: {}", panic_message(&*panic));
    // As a job of the pool from a thread outside of it, so that the caller's own pool, if any, does nothing meanwhile.
    scope(|scope| {
        let rank_main = || {
            // What a panicking rank leaves behind is never looked at: the run ends with its message.
            pool.install(|| catch_unwind(AssertUnwindSafe(|| run(group))))
        };
        let spawned = Builder::new().spawn_scoped(scope, rank_main);
        let handle =
            spawned.map_err(|error| format!("its thread could not be started: {error}"))?;
        match handle.join() {
            Ok(Ok(Ok(value))) => Ok(value),
            Ok(Ok(Err(error))) => Err(message_of(&error)),
            Ok(Err(panic)) | Err(panic) => Err(message_of_panic(panic)),
        }
    })
}
