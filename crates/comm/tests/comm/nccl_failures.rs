//! What becomes of ranks over NCCL when one of them is missing, fails or calls something else, and who is refused.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use candle_comm::{NcclCommunicator, NcclConfig, P2p, ProcessGroup, ReduceOp, launch, message_of};
use candle_core::{DType, Device, Result, Tensor};
use candle_launch::{Control, ControlConfig, WaitNotices};

use crate::cuda::{gpus, open};
use crate::nccl::{Board, alone, devices, each, may_share};

/// A deadline that is long enough to join, and no longer.
fn short() -> Duration {
    let name = gpus().first().map(|gpu| {
        let stream = gpu.as_cuda_device().unwrap().cuda_stream();
        stream.context().name().unwrap()
    });
    match name.as_deref() {
        Some("Emulated GPU") => Duration::from_millis(300),
        _ => Duration::from_secs(5),
    }
}

const LONG: Duration = Duration::from_secs(60);

fn ones(world: &ProcessGroup) -> Result<Tensor> {
    Tensor::ones(1000, DType::F32, world.device())
}

fn messages<T>(results: Vec<Result<T>>) -> Option<[String; 2]> {
    let messages = results.into_iter().map(|result| result.err());
    let messages = messages.map(|error| error.as_ref().map_or(String::new(), message_of));
    messages.collect::<Vec<_>>().try_into().ok()
}

/// The host waits for nothing; the GPU waits until the watcher ends it.
#[test]
fn a_missing_rank_ends_in_the_deadline() {
    let results = each(2, short(), |world| {
        if world.rank() == 1 {
            sleep(3 * short());
            let late = world.all_reduce(&ones(&world)?, ReduceOp::Sum);
            return late.and_then(|_| world.barrier());
        }
        let start = Instant::now();
        let sum = world.all_reduce(&ones(&world)?, ReduceOp::Sum)?;
        assert!(start.elapsed() < short(), "the host has waited");
        world.check()?;
        sum.to_vec1::<f32>()?;
        assert!(start.elapsed() > short() / 2);
        let failed = world.check().unwrap_err().to_string();
        assert!(
            failed.starts_with("what was read on rank 0 cannot complete: "),
            "{failed}"
        );
        let failed = world.all_gather(&ones(&world)?, 0).unwrap_err().to_string();
        assert!(
            failed.starts_with("all_gather of f32 [1000] at "),
            "{failed}"
        );
        assert!(
            failed.contains(" on rank 0 cannot complete: the run over NCCL has failed: "),
            "{failed}"
        );
        Ok(())
    });
    let Some([missed, late]) = messages(results) else {
        return;
    };
    assert!(
        missed.starts_with("all_reduce(sum) of f32 [1000] at "),
        "{missed}"
    );
    let expected = format!(
        "(group [0, 1], operation number 0) on rank 0 is not complete after {} s",
        short().as_secs_f64()
    );
    assert!(missed.contains(&expected), "{missed}");
    // Within a host NCCL hears nothing of the others.
    assert!(
        late.contains("remote process") || late.contains("is not complete"),
        "{late}"
    );
}

/// Rank 0 puts both reductions on its GPU at once, and rank 1 is late for each: together longer than the deadline.
#[test]
fn an_operation_behind_another_is_not_late_with_it() {
    let results = each(2, short(), |world| {
        let is_late = world.rank() == 1;
        let inputs = [ones(&world)?, ones(&world)?];
        let mut sums = Vec::new();
        for input in &inputs {
            if is_late {
                sleep(short() * 3 / 5);
            }
            sums.push(world.all_reduce(input, ReduceOp::Sum)?);
            if is_late {
                sums[0].to_vec1::<f32>()?;
            }
        }
        for sum in sums {
            sum.to_vec1::<f32>()?;
        }
        world.check()
    });
    for result in results {
        result.unwrap();
    }
}

/// What ranks that the run's control plane watches end with.
fn watched(world_size: usize, run: impl Fn(ProcessGroup) -> Result<()> + Sync) -> Vec<String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let listener = Mutex::new(Some(listener));
    let results = each(world_size, short(), |world| {
        let config = ControlConfig {
            rank: world.rank(),
            world_size,
            host: "here".into(),
            master: ("127.0.0.1".into(), port),
            is_one_host: true,
            secret: "secret".into(),
            is_guessable: false,
            fingerprint: Vec::new(),
            cannot_start: None,
            join_timeout: LONG,
            deadline: short(),
            rank_timeout: Duration::from_secs(6),
            wait_notices: WaitNotices::default(),
            ends_process: false,
        };
        let control = match world.rank() {
            0 => Control::join_at(&config, listener.lock().unwrap().take()),
            _ => Control::join(&config),
        };
        let control = control.map_err(candle_core::Error::wrap)?;
        let ended = run(world.watched(&control, false)?);
        if let Err(error) = &ended {
            control.fail(&message_of(error));
        }
        ended
    });
    let errors = results.into_iter().map(Result::unwrap_err);
    errors.map(|error| message_of(&error)).collect()
}

/// The host waits for a copy, with two reductions on the GPU, of which all but one rank have come to the first.
#[test]
fn the_late_rank_is_named_with_several_operations_in_flight() {
    let errors = watched(2, |world| {
        let xs = ones(&world)?;
        world.all_reduce(&xs, ReduceOp::Sum)?.to_vec1::<f32>()?;
        if world.rank() == 1 {
            sleep(3 * short());
        }
        let first = world.start_all_reduce(&xs, ReduceOp::Sum)?;
        let second = world.start_all_reduce(&xs, ReduceOp::Sum)?;
        let ys = (first.wait()? + second.wait()?)?;
        ys.to_vec1::<f32>()?;
        world.check()
    });
    let place = "the deadline, in operation number 1 of group [0, 1], which rank 1 did not call\n";
    let others =
        "operation number 1); 1 more in flight, the oldest all_reduce(sum) of f32 [1000] at ";
    for error in errors {
        assert!(error.contains(place) && error.contains(others), "{error}");
    }
}

#[test]
fn operations_that_do_not_match_end_in_the_deadline() {
    let results = each(2, short(), |world| {
        let xs = ones(&world)?.narrow(0, 0, 500 + 100 * world.rank())?;
        world.all_reduce(&xs, ReduceOp::Sum)?.to_vec1::<f32>()?;
        world.check()
    });
    for message in messages(results).into_iter().flatten() {
        assert!(
            message.contains("is not complete after ") || message.contains("remote process"),
            "{message}"
        );
    }
}

/// Two ranks that first send, and receive in a later batch.
#[test]
fn messages_in_different_batches_wait_for_each_other() {
    let results = each(2, short(), |world| {
        let (xs, peer) = (ones(&world)?, 1 - world.rank());
        let recv = P2p::Recv {
            shape: xs.shape().clone(),
            dtype: DType::F32,
            src: peer,
        };
        let sent = world.start_batch_send_recv(&[P2p::Send { xs: &xs, dst: peer }])?;
        let received = world.start_batch_send_recv(&[recv])?;
        sent.wait()?;
        received.wait()?[0].to_vec1::<f32>()?;
        world.check()
    });
    for message in messages(results).into_iter().flatten() {
        assert!(
            message.contains("batch_send_recv(send f32 [1000] to rank ")
                || message.contains("remote process"),
            "{message}"
        );
    }
}

#[test]
fn a_rank_that_fails_or_panics_ends_the_others() {
    for panics in [false, true] {
        let results = each(2, LONG, |world| {
            let sum = world.start_all_reduce(&ones(&world)?, ReduceOp::Sum)?;
            if world.rank() == 1 {
                assert!(!panics, "on purpose");
                candle_core::bail!("no luck")
            }
            sum.wait()?;
            world.barrier()
        });
        let Some([other, own]) = messages(results) else {
            return;
        };
        let expected = if panics {
            "rank 1 panicked: on purpose"
        } else {
            "no luck"
        };
        assert_eq!(own, expected);
        assert!(
            other.contains("remote process exited or there was a network error"),
            "{other}"
        );
    }
}

/// Rank 0 has failed while it splits a group again and again: what rank 1 is given is aborted too, so it waits for nothing.
#[test]
fn a_split_that_races_a_failure_is_aborted() {
    let _alone = alone();
    for _ in 0..5 {
        let board = Arc::new(Board::default());
        scope(|scope| {
            for (rank, device) in devices(2).into_iter().enumerate() {
                let config = NcclConfig {
                    deadline: [short(), LONG][rank],
                    threads_per_rank: Some(1),
                    ..NcclConfig::new(rank, 2, device, board.exchange(rank))
                };
                scope.spawn(move || {
                    let start = Instant::now();
                    let ended = launch::nccl(config, |world| -> Result<()> {
                        let group = world.split(0, rank)?;
                        // Rank 1 never calls it.
                        let missed = match rank {
                            0 => Some(world.start_all_reduce(&ones(&world)?, ReduceOp::Sum)?),
                            _ => None,
                        };
                        loop {
                            let child = group.split(0, rank)?;
                            if let Err(error) = child.barrier() {
                                drop(missed);
                                return Err(error);
                            }
                        }
                    });
                    assert!(ended.is_err());
                    assert!(start.elapsed() < LONG / 2, "rank {rank}: {ended:?}");
                });
            }
        });
    }
}

#[test]
fn a_group_that_is_kept_is_closed() {
    let kept = each(2, LONG, |world| {
        world.barrier()?;
        Ok((world.split(0, 0)?, world))
    });
    for result in kept {
        let (split, world) = result.unwrap();
        for group in [split, world] {
            let error = group.barrier().unwrap_err();
            assert_eq!(
                error.to_string(),
                "this group is closed: its run over NCCL has ended"
            );
        }
    }
}

/// Groups that are dropped before the end, and communicators without a launch.
#[test]
fn groups_end_in_any_order() -> Result<()> {
    let _alone = alone();
    let board = Arc::new(Board::default());
    scope(|scope| {
        let ranks = devices(2).into_iter().enumerate().map(|(rank, device)| {
            let config = NcclConfig::new(rank, 2, device, board.exchange(rank));
            scope.spawn(move || -> Result<()> {
                let world = ProcessGroup::new(Box::new(NcclCommunicator::join(&config)?));
                let same = world.split(0, rank)?;
                drop(world);
                let other = same.split(3, 1 - rank)?;
                assert_eq!(other.rank(), 1 - rank);
                drop(same);
                let got = other.all_gather(&Tensor::new(&[rank as u32], other.device())?, 0)?;
                assert_eq!(got.to_vec1::<u32>()?, [1, 0]);
                other.check()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    })
}

fn refusal(config: &NcclConfig) -> String {
    let refused = NcclCommunicator::join(config).err();
    refused.map_or(String::new(), |error| message_of(&error))
}

#[test]
fn ranks_that_cannot_join() -> Result<()> {
    let board = Arc::new(Board::default());
    let config = NcclConfig::new(0, 1, Device::Cpu, board.exchange(0));
    assert_eq!(
        refusal(&config),
        "the backend nccl runs on GPUs, got a rank on the CPU\nhint: use the backend mpi, or local"
    );
    let [device, ..] = &devices(1)[..] else {
        return Ok(());
    };
    let config = NcclConfig {
        device: device.clone(),
        ..config
    };
    let other = NcclConfig {
        rank: 1,
        ..config.clone()
    };
    assert_eq!(
        refusal(&other),
        "rank 1 is not a rank of a world of world_size 1"
    );
    let other = NcclConfig {
        device: Device::new_cuda(0)?,
        ..config.clone()
    };
    assert!(
        refusal(&other).starts_with("the backend nccl needs a GPU with one stream, got one opened")
    );
    let other = NcclConfig {
        exchange: Arc::new(|bytes| Ok(bytes[1..].to_vec())),
        ..config.clone()
    };
    assert_eq!(
        refusal(&other),
        "NCCL's unique id has 128 bytes, rank 0 got 127 from rank 0"
    );
    let other = NcclConfig {
        world_size: 2,
        deadline: short(),
        ..config
    };
    let refused = refusal(&other);
    let expected = "rank 0 on cuda:0 cannot join the other ranks: joining group [0, 1] on rank 0 is not complete after ";
    assert!(refused.starts_with(expected), "{refused}");
    Ok(())
}

#[test]
fn two_ranks_on_one_gpu_are_refused() -> Result<()> {
    if gpus().is_empty() || may_share() {
        return Ok(());
    }
    let board = Arc::new(Board::default());
    let devices = [open(0)?, open(0)?];
    scope(|scope| {
        let ranks = devices.into_iter().enumerate().map(|(rank, device)| {
            let config = NcclConfig::new(rank, 2, device, board.exchange(rank));
            scope.spawn(move || refusal(&config))
        });
        for (rank, refused) in ranks.collect::<Vec<_>>().into_iter().enumerate() {
            let refused = refused.join().unwrap();
            let expected = format!(
                "rank {rank} on cuda:0 cannot join the other ranks: NCCL: a group has failed: invalid usage"
            );
            assert!(refused.starts_with(&expected), "{refused}");
            let hint = "hint: NCCL refuses ranks that share a GPU";
            assert!(refused.contains(hint), "{refused}");
        }
    });
    Ok(())
}
