//! Ranks with a GPU each, over NCCL, pass the conformance suite: as threads of this process, each with a communicator of its
//! own.
//!
//! Where there is no GPU these tests say so and pass; with `CANDLE_TRAIN_REQUIRE_CUDA=1` they fail. World sizes that
//! need more GPUs than there are run with several ranks on a GPU if `NCCL_MULTI_RANK_GPU_ENABLE=1` allows it, else not at all.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use candle_comm::{Exchange, HalfSums, NcclConfig, ProcessGroup, launch};
use candle_core::{Device, Result};

use crate::conformance::{self, Launch};
use crate::cuda::{gpus, open};

/// Rank 0's bytes, for ranks that are threads.
#[derive(Default)]
pub struct Board {
    bytes: Mutex<Option<Vec<u8>>>,
    written: Condvar,
}

impl Board {
    pub fn exchange(self: &Arc<Self>, rank: usize) -> Exchange {
        let board = self.clone();
        Arc::new(move |mine| {
            let mut bytes = board.bytes.lock().unwrap();
            if rank == 0 {
                *bytes = Some(mine.to_vec());
                board.written.notify_all();
            }
            while bytes.is_none() {
                bytes = board.written.wait(bytes).unwrap();
            }
            Ok(bytes.clone().unwrap())
        })
    }
}

/// Whether NCCL, from 2.30 on, lets several ranks have one GPU.
pub fn may_share() -> bool {
    std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1")
}

/// The GPUs of the ranks, one each, with streams that no other test uses; none if there are too few.
pub fn devices(world_size: usize) -> Vec<Device> {
    static DEVICES: Mutex<Vec<Device>> = Mutex::new(Vec::new());
    let num_gpus = gpus().len().saturating_sub(1);
    if num_gpus == 0 || num_gpus < world_size && !may_share() {
        println!("{num_gpus} GPUs are too few for {world_size} ranks");
        return Vec::new();
    }
    let mut devices = DEVICES.lock().unwrap();
    while devices.len() < world_size {
        let rank = devices.len();
        devices.push(open(rank % num_gpus).unwrap());
    }
    devices[..world_size].to_vec()
}

/// Keeps other runs away: two at once on the same streams could wait for each other.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE_RUN: Mutex<()> = Mutex::new(());
    ONE_RUN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `run` on ranks that are threads, whatever becomes of the others; nothing if there are too few GPUs.
pub fn each<T: Send>(
    world_size: usize,
    deadline: Duration,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    each_with(world_size, (deadline, HalfSums::F32), run)
}

/// [`each`] with sums of half precision of either kind.
pub fn each_with<T: Send>(
    world_size: usize,
    (deadline, half_sums): (Duration, HalfSums),
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let _alone = alone();
    let board = Arc::new(Board::default());
    thread::scope(|scope| {
        let ranks = devices(world_size)
            .into_iter()
            .enumerate()
            .map(|(rank, device)| {
                let exchange = board.exchange(rank);
                let config = NcclConfig {
                    deadline,
                    half_sums,
                    threads_per_rank: Some(1),
                    ..NcclConfig::new(rank, world_size, device, exchange)
                };
                let run = &run;
                scope.spawn(move || launch::nccl(config, run))
            });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

struct Nccl;

impl Launch for Nccl {
    /// NCCL adds in an order of its own. Emulated it is that of the ranks, which is ours for up to three; on a GPU that ranks share,
    /// two ranks give the same bits in any.
    fn world_sizes(&self) -> &[usize] {
        match may_share() {
            true => &[1, 2],
            false => &[1, 2, 3],
        }
    }

    fn run<T: Send>(
        &self,
        world_size: usize,
        run: impl Fn(ProcessGroup) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        each(world_size, Duration::from_secs(60), run)
            .into_iter()
            .collect()
    }
}

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() -> Result<()> {
            conformance::$name(&Nccl)
        })*
    };
}

for_each_conformance!(conformance);
