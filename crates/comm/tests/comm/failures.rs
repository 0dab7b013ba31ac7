//! Failed, panicked, missing and late ranks become errors, quickly and with the root cause; nothing hangs.

use std::time::{Duration, Instant};

use candle_comm::{LocalConfig, P2p, ProcessGroup, ReduceOp, launch};
use candle_core::{DType, Device, Result, Tensor, bail};

fn ones() -> Tensor {
    Tensor::ones(4, DType::F32, &Device::Cpu).unwrap()
}

/// A message without the backtrace that candle adds when `RUST_BACKTRACE` is set.
fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

/// The message of a run that must fail, well before any deadline.
#[track_caller]
fn failure<T: Send>(world_size: usize, run: impl Fn(ProcessGroup) -> Result<T> + Sync) -> String {
    let started = Instant::now();
    let error = launch::threads(world_size, run)
        .map(|_| "no rank failed")
        .unwrap_err()
        .to_string();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "took {:?}: {error}",
        started.elapsed()
    );
    error
}

#[test]
fn a_failed_rank_ends_the_waits_of_all_groups() {
    let error = failure(5, |world| -> Result<()> {
        let pair = world.split(world.rank() / 2, 0)?;
        if world.rank() == 4 {
            std::thread::sleep(Duration::from_millis(50));
            bail!("out of {}", "luck");
        }
        let failed = match world.rank() {
            // Rank 4 is in none of these groups, but the world has failed.
            0 => {
                let xs = ones();
                pair.all_reduce(&xs, ReduceOp::Sum)?;
                pair.batch_send_recv(&[P2p::Recv {
                    shape: 4.into(),
                    dtype: DType::F32,
                    src: 1,
                }])
                .map(|_| ())
            }
            1 => {
                pair.all_reduce(&ones(), ReduceOp::Sum)?;
                world.barrier()
            }
            2 => pair
                .batch_send_recv(&[P2p::Recv {
                    shape: 4.into(),
                    dtype: DType::F32,
                    src: 1,
                }])
                .map(|_| ()),
            _ => pair.start_all_gather(&ones())?.wait().map(|_| ()),
        };
        let said = failed.unwrap_err().to_string();
        assert!(
            said.contains("cannot complete: rank 4 failed: out of luck"),
            "{said}"
        );
        assert!(
            said.contains(&format!("on rank {}", world.rank())) && said.contains("failures.rs:"),
            "{said}"
        );
        let again = world
            .all_reduce(&ones(), ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(again.contains("rank 4 failed: out of luck"), "{again}");
        bail!("rank {} noticed", world.rank())
    });
    assert_eq!(first_line(&error), "rank 4 failed: out of luck");
}

#[test]
fn waits_end_within_milliseconds() -> Result<()> {
    let error = launch::threads(2, |world| {
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100));
            world.batch_send_recv(&[P2p::Send {
                xs: &now()?,
                dst: 0,
            }])?;
            bail!("now")
        }
        let recv = P2p::Recv {
            shape: 1.into(),
            dtype: DType::F64,
            src: 1,
        };
        let sent = world.batch_send_recv(&[recv])?[0].to_vec1::<f64>()?[0];
        assert!(world.barrier().is_err());
        let after = now()?.to_vec1::<f64>()?[0] - sent;
        assert!(after < 0.5, "noticed after {after} s");
        Ok(())
    });
    assert_eq!(
        first_line(&error.unwrap_err().to_string()),
        "rank 1 failed: now"
    );
    Ok(())
}

/// Seconds since 1970.
fn now() -> Result<Tensor> {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    Tensor::new(&[now.as_secs_f64()], &Device::Cpu)
}

#[test]
fn a_panic_is_a_failure() {
    let error = failure(3, |world| {
        if world.rank() == 1 {
            panic!("the {} is on purpose", "panic");
        }
        world.all_reduce(&ones(), ReduceOp::Sum)
    });
    assert_eq!(error, "rank 1 failed: panicked: the panic is on purpose");
}

/// A rank that fails while an operation of its own is in flight does not wait for ranks that wait for it.
#[test]
fn pending_operations_do_not_delay_a_failure() {
    for panics in [false, true] {
        let error = failure(2, |world| {
            if world.rank() == 0 {
                let recv = || P2p::Recv {
                    shape: 4.into(),
                    dtype: DType::F32,
                    src: 1,
                };
                let _reduced = world.start_all_reduce(&ones(), ReduceOp::Sum)?;
                let _received = world.start_batch_send_recv(&[recv()])?;
                assert!(!panics, "after starting");
                bail!("after starting")
            }
            let recv = P2p::Recv {
                shape: 4.into(),
                dtype: DType::F32,
                src: 0,
            };
            world.batch_send_recv(&[recv]).map(|_| ())
        });
        let panicked = if panics { "panicked: " } else { "" };
        assert_eq!(
            first_line(&error),
            format!("rank 0 failed: {panicked}after starting")
        );
    }
}

#[test]
fn a_rank_that_returns_early_has_left() {
    let error = failure(3, |world| {
        world.barrier()?;
        if world.rank() != 2 {
            world.all_reduce(&ones(), ReduceOp::Sum)?;
        }
        Ok(())
    });
    for word in [
        "all_reduce(sum) of f32 [4] at",
        "cannot complete: rank 2 has left",
        "failures.rs:",
    ] {
        assert!(error.contains(word), "{word}: {error}");
    }
    assert!(
        error.contains("  rank 2: barrier at") && error.contains("operation number 0), then left"),
        "{error}"
    );
    let error = failure(2, |world| {
        if world.rank() == 0 {
            world.batch_send_recv(&[P2p::Recv {
                shape: 4.into(),
                dtype: DType::F32,
                src: 1,
            }])?;
        }
        Ok(())
    });
    assert!(error.contains("receive f32 [4] from rank 1"), "{error}");
    assert!(
        error.contains("rank 1 has left")
            && error.contains("rank 1: has started no operation, then left"),
        "{error}"
    );
}

/// What a rank sent or started before it returned still reaches the others.
#[test]
fn leaving_after_taking_part_is_fine() -> Result<()> {
    launch::threads(2, |world| {
        if world.rank() == 0 {
            world.batch_send_recv(&[P2p::Send {
                xs: &ones(),
                dst: 1,
            }])?;
            drop(world.start_all_reduce(&ones(), ReduceOp::Sum)?);
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
        let sum = world.all_reduce(&ones(), ReduceOp::Sum)?;
        assert_eq!(sum.to_vec1::<f32>()?, [2.0; 4]);
        let got = world.batch_send_recv(&[P2p::Recv {
            shape: 4.into(),
            dtype: DType::F32,
            src: 0,
        }])?;
        assert_eq!(got[0].to_vec1::<f32>()?, [1.0; 4]);
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_deadline_tells_what_every_rank_did_last() {
    let deadline = Duration::from_millis(600);
    let error = launch::threads_with(
        LocalConfig {
            deadline,
            ..LocalConfig::new(4)
        },
        |world| {
            let pair = world.split(world.rank() / 2, 0)?;
            match world.rank() {
                0 => world.all_reduce(&ones(), ReduceOp::Sum).map(|_| ()),
                1 => {
                    let gather = pair.start_all_gather(&ones())?;
                    std::thread::sleep(Duration::from_millis(1500));
                    gather.wait().map(|_| ())
                }
                2 => {
                    std::thread::sleep(Duration::from_millis(1500));
                    world.barrier()
                }
                _ => {
                    std::thread::sleep(Duration::from_millis(100));
                    world
                        .batch_send_recv(&[P2p::Recv {
                            shape: 7.into(),
                            dtype: DType::BF16,
                            src: 2,
                        }])
                        .map(|_| ())
                }
            }
        },
    );
    let error = error.map(|_| ()).unwrap_err().to_string();
    for word in [
        "not arrived: ranks 1, 2, 3",
        "is not complete after 0.6 s",
        "  rank 0: all_reduce(sum) of f32 [4] at crates/comm/tests/comm/failures.rs:",
        "(group [0, 1, 2, 3], operation number 1)",
        "  rank 1: all_gather of f32 [4] at crates/comm/tests/comm/failures.rs:",
        "(group [0, 1], operation number 0)",
        "  rank 2: split at crates/comm/tests/comm/failures.rs:",
        "  rank 3: batch_send_recv(receive bf16 [7] from rank 2) at crates/comm/tests/comm/failures.rs:",
        "hint: ",
    ] {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn a_world_needs_a_rank() {
    let error = launch::threads(0, |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("world_size 0"), "{error}");
}

/// Failures at random moments of a busy run: always the root cause, never a hang.
#[test]
fn random_failures_end_the_run_with_the_root_cause() {
    for seed in 0..20 {
        let culprit = seed as usize % 3;
        let config = LocalConfig {
            delays: Some(seed),
            ..LocalConfig::new(3)
        };
        let error = launch::threads_with(config, |world| {
            let mut in_flight = Vec::new();
            for step in 0..10 {
                if world.rank() == culprit && step == seed % 10 {
                    bail!("step {step}");
                }
                in_flight.push(world.start_all_reduce(&ones(), ReduceOp::Sum)?);
                if step % 3 == 2 {
                    in_flight
                        .drain(..)
                        .try_for_each(|pending| pending.wait().map(|_| ()))?;
                }
                let (dst, src) = ((world.rank() + 1) % 3, (world.rank() + 2) % 3);
                let recv = P2p::Recv {
                    shape: 4.into(),
                    dtype: DType::F32,
                    src,
                };
                world.batch_send_recv(&[P2p::Send { xs: &ones(), dst }, recv])?;
            }
            Ok(())
        });
        assert_eq!(
            first_line(&error.unwrap_err().to_string()),
            format!("rank {culprit} failed: step {}", seed % 10)
        );
    }
}

#[test]
fn nobody_is_blamed_for_what_all_ranks_find() {
    for world_size in [1, 3] {
        let error = failure(world_size, |_| -> Result<()> { bail!("no such file") });
        assert_eq!(first_line(&error), "no such file");
    }
    let error = failure(3, |world| -> Result<()> {
        bail!("no file {}", world.rank() / 2)
    });
    assert!(error.starts_with("rank "), "{error}");
}

#[test]
fn ranks_that_wait_for_each_other_in_different_groups_are_told_at_once() {
    let started = Instant::now();
    // Two groups with the same members, and three pairs around a circle.
    let error = failure(2, |world| {
        let same = world.split(0, 0)?;
        match world.rank() {
            0 => same.all_reduce(&ones(), ReduceOp::Sum).map(drop),
            _ => world.barrier(),
        }
    });
    for words in [
        "ranks 0, 1 wait for each other",
        "all_reduce",
        "barrier",
        "if rank == 0",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let error = failure(3, |world| {
        let pairs = [[0, 1], [1, 2], [2, 0]].map(|pair| {
            let is_in = pair.contains(&world.rank());
            world.split(usize::from(is_in), 0)
        });
        let pairs = pairs.into_iter().collect::<Result<Vec<_>>>()?;
        pairs[world.rank()].barrier()
    });
    assert!(
        error.contains("ranks 0, 1, 2 wait for each other"),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_secs(20), "{error}");
}

#[test]
fn ranks_that_wait_for_what_another_thread_of_a_rank_brings_are_left_alone() -> Result<()> {
    for delays in [[0, 100], [100, 0]] {
        beside_each_other(delays)?;
    }
    // Both are late: until then each main thread is seen to wait for a rank that waits, in another group.
    launch::threads(2, |world| {
        let first = world.split(0, 0)?;
        let second = world.split(0, 0)?;
        let (mine, theirs) = match world.rank() {
            0 => (first, second),
            _ => (second, first),
        };
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(400));
                theirs.barrier()
            });
            mine.barrier()?;
            worker.join().expect("no panic")
        })
    })?;
    Ok(())
}

/// A collective of a second thread of each rank, beside one of the first.
fn beside_each_other(delays: [u64; 2]) -> Result<()> {
    launch::threads(2, |world| {
        let other = world.split(0, 0)?;
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(delays[world.rank()]));
                other.all_reduce(&ones(), ReduceOp::Sum).map(drop)
            });
            std::thread::sleep(Duration::from_millis(delays[1 - world.rank()]));
            world.barrier()?;
            first.join().expect("no panic")
        })
    })?;
    Ok(())
}
