//! The MPI backend passes the conformance suite, gives the bits of the local backend, and fails with everybody.

use std::net::TcpListener;
use std::thread::sleep;
use std::time::{Duration, Instant};

use candle_comm::{
    Backend, Degrees, MpiConfig, P2p, ProcessGroup, RankEnv, ReduceOp, RunConfig, Scope, launch,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_launch::{Control, ControlConfig};

use crate::conformance;
use crate::determinism;
use crate::mpi_bits::{any_bits, raw};
use crate::mpirun::{Mpi, output, output_alone, run, said};
use crate::threads::Threads;

pub fn conforms(world: &ProcessGroup) -> Result<()> {
    let mpi = &Mpi::new(world);
    macro_rules! each {
        ($($name:ident),* $(,)?) => {
            $(conformance::$name(mpi)?;)*
        };
    }
    for_each_conformance!(each);
    conformance::large(mpi)?;
    conformance::background(mpi)
}

/// Threads are limited, processes are not.
#[test]
fn a_run_may_have_more_ranks_than_a_process_has_threads() -> Result<()> {
    let config = |backend, num_processes: usize| {
        let env = RankEnv::from_lookup("here", &|name| match name {
            "RANK" | "LOCAL_RANK" => Some("0".into()),
            "WORLD_SIZE" => Some(num_processes.to_string()),
            "LOCAL_WORLD_SIZE" => Some("1".into()),
            _ => None,
        });
        let degrees = Degrees {
            dp: 1025,
            ..Degrees::default()
        };
        RunConfig::new(backend, env.unwrap(), degrees, vec![Device::Cpu])
    };
    assert_eq!(config(Backend::Mpi, 1025)?.env.world_size(), 1025);
    let threads = config(Backend::Local, 1).unwrap_err().to_string();
    let expected = "pp(1) * dp(1025) * cp(1) * tp(1) is more than the 1024 ranks that may be threads of one process\nhint: ";
    assert!(threads.starts_with(expected), "{threads}");
    let processes = config(Backend::Mpi, 1024).unwrap_err().to_string();
    assert!(processes.contains(" = 1025 ranks, but "), "{processes}");
    Ok(())
}

#[test]
fn one_rank_conforms() {
    run("mpi::one_rank_conforms", 1, |world| conforms(&world));
}

#[test]
fn two_ranks_conform() {
    run("mpi::two_ranks_conform", 2, |world| conforms(&world));
}

#[test]
fn three_ranks_conform() {
    run("mpi::three_ranks_conform", 3, |world| conforms(&world));
}

#[test]
fn four_ranks_conform() {
    run("mpi::four_ranks_conform", 4, |world| conforms(&world));
}

#[test]
fn five_ranks_conform() {
    run("mpi::five_ranks_conform", 5, |world| conforms(&world));
}

/// Steps in which groups of groups, messages and started operations are mixed, with ranks that are late in turns.
#[test]
fn steps_of_mixed_operations_give_the_bits_of_threads() {
    run(
        "mpi::steps_of_mixed_operations_give_the_bits_of_threads",
        4,
        |world| {
            let expected = determinism::run(&Threads::default())?;
            for late in 0..4 {
                if world.rank() == late {
                    sleep(Duration::from_millis(20));
                }
                let got = determinism::steps(&world)?;
                assert!(got == expected[world.rank()], "rank {late} was late");
            }
            Ok(())
        },
    );
}

/// Each rank's sends are larger than what MPI takes without a receiver, and all send before they receive.
#[test]
fn large_messages_in_circles() {
    run("mpi::large_messages_in_circles", 3, |world| {
        let (rank, n) = (world.rank(), world.world_size());
        let message = |rank: usize, i: u64| any_bits(i, rank, &[1_000_003], DType::F32);
        let recv = P2p::Recv {
            shape: 1_000_003.into(),
            dtype: DType::F32,
            src: (rank + n - 1) % n,
        };
        for i in 0..3 {
            let xs = message(rank, i)?;
            let dst = (rank + 1) % n;
            world.batch_send_recv(&[P2p::Send { xs: &xs, dst }])?;
        }
        let got = world.batch_send_recv(&vec![recv; 3])?;
        for (i, got) in got.iter().enumerate() {
            assert!(raw(got)? == raw(&message((rank + n - 1) % n, i as u64)?)?);
        }
        Ok(())
    });
}

fn zeros(dims: &[usize]) -> Result<Tensor> {
    Tensor::zeros(dims, DType::F32, &Device::Cpu)
}

#[track_caller]
fn assert_says<T>(result: Result<T>, words: &[&str]) {
    let said = result.map(|_| "no error".to_string());
    let said = said.unwrap_or_else(|error| error.to_string());
    for word in words {
        assert!(said.contains(word), "should say {word:?}: {said}");
    }
}

/// Found on all ranks before data move; the group goes on.
#[test]
fn ranks_that_disagree() {
    run("mpi::ranks_that_disagree", 3, |world| {
        let xs = zeros(&[[2, 3], [2, 3], [2, 4]][world.rank()])?;
        let got = world.all_reduce(&xs, ReduceOp::Sum);
        assert_says(
            got,
            &[
                "ranks disagree in group [0, 1, 2], operation number 0",
                "all_reduce(sum) of f32 [2, 3] at ",
                "rank 2: all_reduce(sum) of f32 [2, 4] at ",
                "mpi.rs:",
            ],
        );
        let large = zeros(&[300_000 + world.rank()])?;
        assert_says(world.all_gather(&large, 0), &["operation number 1"]);
        let sizes = [[1, 2, 3], [1, 2, 3], [1, 2, 4]][world.rank()];
        let xs = zeros(&[sizes[world.rank()], 300_000])?;
        let words = [
            "gather(root 1, sizes [1, 2, 3]) of f32 [6, 300000] at ",
            "rank 2: gather(root 1, sizes [1, 2, 4]) of f32 [7, 300000] at ",
        ];
        assert_says(world.gather(&xs, &sizes, 1, 0), &words);
        let root = world.rank() / 2;
        let words = ["reduce(prod, root 0)", "rank 2: reduce(prod, root 1)"];
        assert_says(world.reduce(&zeros(&[3])?, root, ReduceOp::Prod), &words);
        let kinds = match world.rank() {
            0 => world.barrier(),
            _ => world.split(0, 0).map(|_| ()),
        };
        assert_says(kinds, &["rank 0: barrier at", ": split at"]);
        let block = 2 + world.rank() / 2;
        let (what, number) = ("backward pass", 0);
        let scope = Scope {
            what,
            block,
            number,
        };
        let xs = zeros(&[2, 3])?;
        let (scopes, _) = scope.run(&world, || world.all_reduce(&xs, ReduceOp::Sum));
        assert_says(scopes, &["block 2, collective 0", "block 3, collective 0"]);
        world.barrier()
    });
}

/// The receiver is told, and the next messages are where they should be.
#[test]
fn messages_of_another_shape() {
    run("mpi::messages_of_another_shape", 2, |world| {
        let sizes = [3, 500_000];
        if world.rank() == 0 {
            for size in sizes {
                let (xs, dst) = (&zeros(&[size])?, 1);
                world.batch_send_recv(&[P2p::Send { xs, dst }, P2p::Send { xs, dst }])?;
            }
            return Ok(());
        }
        let recv = |size: usize| P2p::Recv {
            shape: size.into(),
            dtype: DType::F32,
            src: 0,
        };
        for size in sizes {
            let wrong = world.batch_send_recv(&[recv(size + 1)]);
            let (sent, asked) = (format!("rank 0: sent f32 [{size}] at"), size + 1);
            let asked = format!("rank 1: receives f32 [{asked}] at");
            assert_says(wrong, &["group [0, 1]", &sent, &asked, "mpi.rs:"]);
            assert_eq!(world.batch_send_recv(&[recv(size)])?[0].dims(), [size]);
        }
        Ok(())
    });
}

#[test]
fn a_late_rank_is_named() {
    let output = output(
        "mpi::a_late_rank_is_named",
        3,
        Duration::from_secs(1),
        |world| {
            world.barrier()?;
            if world.rank() == 1 {
                sleep(Duration::from_millis(2500));
                return world.barrier();
            }
            let start = Instant::now();
            let words = [
                "barrier at",
                "is not complete after 1 s: not arrived: rank 1\n",
                "rank 1: barrier at",
                "operation number 0), as last heard here",
                "hint: ",
            ];
            assert_says(world.barrier(), &words);
            assert!(start.elapsed() < Duration::from_secs(2));
            Ok(())
        },
    );
    if let Some(output) = output {
        // The end of the run waits for rank 1 no longer than the deadline either, so it may fail or not.
        let said = said(&output);
        assert!(!said.contains("should say"), "{said}");
    }
}

/// The group of all ranks, watched by a control plane with this deadline.
fn watched(world: &ProcessGroup, deadline: Duration) -> Result<ProcessGroup> {
    let listener = (world.rank() == 0).then(|| TcpListener::bind("127.0.0.1:0"));
    let listener = listener.transpose()?;
    let port = match &listener {
        Some(listener) => listener.local_addr()?.port(),
        None => 0,
    };
    let ports = world.all_gather(&Tensor::new(&[u32::from(port)], &Device::Cpu)?, 0)?;
    let config = ControlConfig {
        deadline,
        is_one_host: true,
        ..ControlConfig::at(
            &RankEnv::from_env().map_err(candle_core::Error::wrap)?,
            ("127.0.0.1".into(), ports.to_vec1::<u32>()?[0] as u16),
        )
    };
    let control = Control::join_at(&config, listener);
    let control = control.map_err(candle_core::Error::wrap)?;
    world.watched(&control, false)
}

/// One rank is in a barrier of all, the other in one of another group with the same members: neither will ever come to the other's.
#[test]
fn ranks_that_wait_for_each_other_are_told_long_before_the_deadline() {
    const TEST: &str = "mpi::ranks_that_wait_for_each_other_are_told_long_before_the_deadline";
    let begin = Instant::now();
    let output = output(TEST, 2, Duration::from_secs(600), |world| {
        let world = watched(&world, Duration::from_secs(600))?;
        let again = world.split(0, 0)?;
        let groups = [&world, &again];
        groups[world.rank()].barrier()?;
        groups[1 - world.rank()].barrier()
    });
    if let Some(output) = output {
        let said = said(&output);
        let expected = "ranks 0, 1 wait for each other in different groups\n";
        assert!(said.contains(expected), "{said}");
        assert!(
            said.contains("hint: every rank must call the same operations"),
            "{said}"
        );
        assert!(begin.elapsed() < Duration::from_secs(60), "{said}");
    }
}

/// Several operations are in flight on two groups when a rank is late at the first of one, and all ranks are told so.
#[test]
fn a_late_rank_is_named_with_several_operations_in_flight() {
    const TEST: &str = "mpi::a_late_rank_is_named_with_several_operations_in_flight";
    let output = output(TEST, 3, Duration::from_secs(60), |world| {
        let world = watched(&world, Duration::from_secs(1))?;
        let others = world.split(usize::from(world.rank() == 2), 0)?;
        if world.rank() < 2 {
            let xs = zeros(&[200_000])?;
            let first = world.start_all_reduce(&xs, ReduceOp::Sum)?;
            let second = world.start_all_reduce(&xs, ReduceOp::Sum)?;
            let other = others.start_all_reduce(&xs, ReduceOp::Sum)?;
            // In another order on each rank.
            match world.rank() {
                0 => first.wait()?,
                _ => second.wait()?,
            };
            other.wait()?;
        }
        sleep(Duration::from_secs(20));
        Ok(())
    });
    if let Some(output) = output {
        let said = said(&output);
        let expected = " of group [0, 1, 2], which rank 2 did not call";
        assert!(said.contains(expected), "{said}");
        assert!(
            said.contains(" more in flight, the oldest all_reduce(sum) of f32 [200000] at "),
            "{said}"
        );
    }
}

#[test]
fn a_rank_that_left_is_named() {
    run("mpi::a_rank_that_left_is_named", 2, |world| {
        if world.rank() == 0 {
            let words = ["barrier at", "rank 1 has left"];
            assert_says(world.barrier(), &words);
            let recv = P2p::Recv {
                shape: 1.into(),
                dtype: DType::F32,
                src: 1,
            };
            assert_says(world.batch_send_recv(&[recv]), &["rank 1 has left"]);
        }
        Ok(())
    });
}

/// Their sender is not held up at the end.
#[test]
fn messages_that_nobody_receives() {
    run("mpi::messages_that_nobody_receives", 2, |world| {
        let pair = world.split(0, 0)?;
        if world.rank() == 0 {
            for size in [1, 2_000_000] {
                let (xs, dst) = (&zeros(&[size])?, 1);
                pair.batch_send_recv(&[P2p::Send { xs, dst }])?;
            }
        }
        Ok(())
    });
}

/// A result that is dropped, and an input that is written to after: the other ranks get what it was.
#[test]
fn inputs_of_dropped_results() {
    run("mpi::inputs_of_dropped_results", 2, |world| {
        for len in [5, 3_000_000] {
            let xs = Tensor::ones(len, DType::F32, &Device::Cpu)?;
            if world.rank() == 0 {
                drop(world.start_all_reduce(&xs, ReduceOp::Sum)?);
                xs.zero_set()?;
                world.batch_send_recv(&[P2p::Send { xs: &xs, dst: 1 }])?;
            } else {
                let recv = P2p::Recv {
                    shape: len.into(),
                    dtype: DType::F32,
                    src: 0,
                };
                world.batch_send_recv(&[recv])?;
                let sum = world.all_reduce(&xs, ReduceOp::Sum)?;
                assert!(sum.to_vec1::<f32>()?.iter().all(|x| *x == 2.0));
            }
        }
        Ok(())
    });
}

#[test]
fn a_rank_that_fails_ends_all() {
    let output = output(
        "mpi::a_rank_that_fails_ends_all",
        3,
        Duration::from_secs(60),
        |world| {
            if world.rank() == 1 {
                candle_core::bail!("the data are gone");
            }
            world.barrier()
        },
    );
    if let Some(output) = output {
        let said = said(&output);
        assert!(!output.status.success(), "{said}");
        assert!(said.contains("rank 1 failed: the data are gone"), "{said}");
    }
}

#[test]
fn a_rank_that_panics_ends_all() {
    let output = output(
        "mpi::a_rank_that_panics_ends_all",
        3,
        Duration::from_secs(60),
        |world| {
            assert!(world.rank() != 2, "rank two is unlucky");
            world.barrier()
        },
    );
    if let Some(output) = output {
        let said = said(&output);
        assert!(!output.status.success(), "{said}");
        let words = "rank 2 failed: panicked: rank two is unlucky";
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn mpi_starts_once_per_process() {
    run("mpi::mpi_starts_once_per_process", 1, |_| {
        let again = launch::mpi(MpiConfig::default(), |_| Ok(()));
        assert_says(again, &["already", "hint: call launch::mpi once"]);
        Ok(())
    });
}

/// As under a launcher that MPI does not know: each process would take itself for the whole run.
#[test]
fn a_rank_without_the_others_is_told() {
    let output = output_alone("mpi::a_rank_without_the_others_is_told");
    if let Some(output) = output {
        let said = said(&output);
        assert!(!output.status.success(), "{said}");
        for words in [
            "MPI says that this process is its only rank, but WORLD_SIZE=4",
            "hint: start the program by the mpirun of the MPI library",
        ] {
            assert!(said.contains(words), "{said}");
        }
    }
}
