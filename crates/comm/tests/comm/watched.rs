//! Groups that the run's `Control` watches: the ranks are threads, each with a `Control` of its own.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_comm::{P2p, ProcessGroup, ReduceOp, launch};
use candle_core::{DType, Result, Tensor};
use candle_launch::{Control, ControlConfig, WaitNotices};

use crate::conformance::{self, Launch};

fn config(rank: usize, world_size: usize, port: u16) -> ControlConfig {
    ControlConfig {
        rank,
        world_size,
        host: "here".into(),
        master: ("127.0.0.1".into(), port),
        is_one_host: true,
        secret: "secret".into(),
        is_guessable: false,
        fingerprint: Vec::new(),
        cannot_start: None,
        join_timeout: Duration::from_secs(20),
        wait_notices: WaitNotices::default(),
        deadline: Duration::from_secs(20),
        rank_timeout: Duration::from_secs(6),
        ends_process: false,
    }
}

/// Runs ranks whose group is watched and checked.
struct Checked;

impl Checked {
    fn run_with<T: Send>(
        world_size: usize,
        change: impl Fn(&mut ControlConfig) + Sync,
        run: impl Fn(ProcessGroup, &Arc<Control>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        run_watched((world_size, true), change, run)
    }
}

/// Runs ranks whose group is watched, and checked if so.
fn run_watched<T: Send>(
    (world_size, checks): (usize, bool),
    change: impl Fn(&mut ControlConfig) + Sync,
    run: impl Fn(ProcessGroup, &Arc<Control>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let listener = Mutex::new(Some(listener));
    launch::threads(world_size, |world| {
        let mut config = config(world.rank(), world_size, port);
        change(&mut config);
        let control = match world.rank() {
            0 => Control::join_at(&config, listener.lock().unwrap().take()),
            _ => Control::join(&config),
        };
        let control = control.map_err(candle_core::Error::wrap)?;
        let result = run(world.watched(&control, checks)?, &control);
        match &result {
            Ok(_) => control.leave().map_err(candle_core::Error::wrap)?,
            Err(error) => drop(control.fail(&error.to_string())),
        }
        result
    })
}

impl Launch for Checked {
    fn world_sizes(&self) -> &[usize] {
        &[2, 3]
    }

    fn run<T: Send>(
        &self,
        world_size: usize,
        run: impl Fn(ProcessGroup) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        Self::run_with(world_size, |_| {}, |world, _| run(world))
    }
}

#[test]
fn it_is_the_backend_it_wraps() -> Result<()> {
    macro_rules! each {
        ($($name:ident),* $(,)?) => {
            $(conformance::$name(&Checked)?;)*
        };
    }
    for_each_conformance!(each);
    Ok(())
}

#[test]
fn a_mismatch_is_found_before_the_backend_is_called() {
    let errors = Checked::run_with(
        2,
        |_| {},
        |world, _| {
            let xs = Tensor::zeros(4 + world.rank(), DType::F32, world.device())?;
            let error = world.all_reduce(&xs, ReduceOp::Sum).unwrap_err();
            Ok(error.to_string())
        },
    );
    for error in errors.unwrap() {
        let expected = "ranks disagree in group [0, 1], operation number 0:\n  rank 0: all_reduce(sum) of f32 [4] at ";
        assert!(error.starts_with(expected), "{error}");
        assert!(
            error.contains("rank 1: all_reduce(sum) of f32 [5] at"),
            "{error}"
        );
        assert!(error.contains("watched.rs:"), "{error}");
        assert!(error.contains("with the same shape and dtype"), "{error}");
    }
}

#[test]
fn groups_that_are_split_off_are_compared_by_themselves() {
    let errors = Checked::run_with(
        4,
        |_| {},
        |world, _| {
            let pair = world.split(world.rank() % 2, 3 - world.rank())?;
            let pair = pair.split(0, pair.rank())?;
            pair.barrier()?;
            if world.rank() == 3 {
                return Ok(pair.barrier().unwrap_err().to_string());
            }
            if world.rank() == 1 {
                let xs = Tensor::zeros(1, DType::U8, world.device())?;
                return Ok(pair.broadcast(&xs, 0).unwrap_err().to_string());
            }
            pair.barrier()?;
            Ok(String::new())
        },
    )
    .unwrap();
    assert_eq!((errors[0].as_str(), &errors[1]), ("", &errors[3]));
    let error = &errors[1];
    assert!(
        error.starts_with("ranks disagree in group [3, 1], operation number 1:"),
        "{error}"
    );
    assert!(
        error.contains("  rank 1: broadcast(root 0) of u8 [1] at"),
        "{error}"
    );
    assert!(error.contains("  rank 3: barrier at"), "{error}");
}

#[test]
fn the_deadline_names_the_operation_that_a_rank_waits_in() {
    let reports = Checked::run_with(
        2,
        |config| config.deadline = Duration::from_millis(600),
        |world, control| {
            world.set_step(7, "forward");
            world.barrier()?;
            if world.rank() == 0 {
                return Ok(world.barrier().unwrap_err().to_string());
            }
            // A started operation may last: this rank does not wait for it.
            let started = world.start_batch_send_recv(&[P2p::Recv {
                shape: 1.into(),
                dtype: DType::F32,
                src: 0,
            }])?;
            while control.failure().is_none() {
                std::thread::sleep(Duration::from_millis(20));
            }
            drop(started);
            Ok(control.failure().unwrap().message)
        },
    );
    let error = reports.unwrap_err().to_string();
    assert!(
        error.contains("rank 0 is blocked for more than 0.6 s, the deadline, in operation number 1 of group [0, 1], "),
        "{error}"
    );
    assert!(error.contains("which rank 1 did not call\n"), "{error}");
    let lines: Vec<&str> = error.lines().collect();
    let line = |rank: &str| *lines.iter().find(|line| line.contains(rank)).unwrap();
    let zero = line("  rank 0 on host here");
    assert!(zero.contains("s in barrier at "), "{zero}");
    assert!(
        zero.contains("(group [0, 1], operation number 1); step 8, forward"),
        "{zero}"
    );
    let one = line("  rank 1 on host here");
    assert!(
        one.contains("started batch_send_recv(receive f32 [1] from rank 0) at "),
        "{one}"
    );
    assert!(one.contains("not waited for yet; step 8, forward"), "{one}");
}

/// Gradients of two buckets under way on one group when a rank is late at the first, and waits elsewhere itself.
#[test]
fn the_late_rank_is_named_with_several_operations_in_flight() {
    let reports = run_watched(
        (3, false),
        |config| config.deadline = Duration::from_millis(600),
        |world, control| {
            world.barrier()?;
            let pair = world.split(world.rank().div_ceil(2), 0)?;
            let mut in_flight = Vec::new();
            if world.rank() < 2 {
                let xs = Tensor::ones(10, DType::F32, world.device())?;
                for _ in 0..3 {
                    in_flight.push(world.start_all_reduce(&xs, ReduceOp::Sum)?);
                }
                if world.rank() == 1 {
                    // What rank 2 is to answer too.
                    in_flight.insert(0, pair.start_all_reduce(&xs, ReduceOp::Sum)?);
                    in_flight.swap(0, 3);
                }
                return Ok(in_flight.remove(0).wait().unwrap_err().to_string());
            }
            while control.failure().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(control.failure().unwrap().message)
        },
    );
    let report = reports.unwrap_err().to_string();
    // Whichever rank says it first.
    let place = "the deadline, in operation number";
    let expected = [
        format!("{place} 2 of group [0, 1, 2], which rank 2 did not call\n"),
        format!(
            "{place} 4 of group [0, 1, 2], which rank 2 did not call, nor number 2 before it\n"
        ),
    ];
    assert!(
        expected.iter().any(|expected| report.contains(expected)),
        "{report}"
    );
    let line = |rank: &str| report.lines().find(|line| line.starts_with(rank)).unwrap();
    let zero = line("  rank 0 on host here");
    assert!(
        zero.contains("s in all_reduce(sum) of f32 [10] at "),
        "{zero}"
    );
    assert!(
        zero.contains("operation number 2); 2 more in flight, the oldest all_reduce"),
        "{zero}"
    );
    assert!(
        line("  rank 2 on host").contains(": finished split at "),
        "{report}"
    );
}
