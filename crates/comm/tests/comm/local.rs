//! The local backend passes the conformance suite, with and without injected delays; and what is special to threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_comm::{LocalConfig, ProcessGroup, ReduceOp, launch};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::conformance::{self, ops};
use crate::reference::{assert_same, input};
use crate::threads::Threads;

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() -> Result<()> {
            conformance::$name(&Threads::default())
        })*
    };
}

for_each_conformance!(conformance);
conformance!(large, background);

#[test]
fn with_delays() -> Result<()> {
    for seed in 0..3 {
        let threads = Threads {
            delays: Some(seed),
            ..Threads::default()
        };
        conformance::splits(&threads)?;
        conformance::many_in_flight(&threads)?;
        conformance::message_order(&threads)?;
        conformance::rooted_in_flight(&threads)?;
        conformance::independent_results(&threads)?;
        conformance::background(&threads)?;
    }
    Ok(())
}

#[test]
fn a_barrier_holds_everybody_back() -> Result<()> {
    let arrived = AtomicUsize::new(0);
    launch::threads_with(
        LocalConfig {
            delays: Some(1),
            ..LocalConfig::new(4)
        },
        |world| {
            for round in 1..=10 {
                arrived.fetch_add(1, Ordering::SeqCst);
                world.barrier()?;
                assert!(arrived.load(Ordering::SeqCst) >= 4 * round);
                world.barrier()?;
            }
            Ok(())
        },
    )?;
    Ok(())
}

#[test]
fn a_group_of_one_returns_its_input() -> Result<()> {
    let world = ProcessGroup::single(Device::Cpu);
    let xs = Var::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let results = [
        world.all_reduce(&xs, ReduceOp::Sum)?,
        world.all_gather(&xs, 1)?,
        world.reduce_scatter(&xs, ReduceOp::Max, 1)?,
        world.broadcast(&xs, 0)?,
        world.all_to_all(&xs, 1)?,
    ];
    // All share the input's storage.
    let ones = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
    xs.set(&ones)?;
    for ys in results {
        assert_same("result", &ys, &ones)?;
        assert!(!ys.is_variable(), "results carry no graph");
    }
    assert!(world.batch_send_recv(&[])?.is_empty());
    world.barrier()?;
    assert_eq!(world.split(3, 4)?.world_size(), 1);
    assert_eq!(world.all_gather_bytes(b"me")?, [b"me"]);
    assert_eq!(world.counters().total().calls, 0);
    assert!(
        !world.all_reduce(&xs, ReduceOp::Sum)?.is_variable(),
        "results carry no graph"
    );
    Ok(())
}

#[test]
fn a_nan_on_one_rank_is_seen_by_all() -> Result<()> {
    for nan_rank in 0..3 {
        launch::threads(3, |world| {
            let x = if world.rank() == nan_rank {
                f32::NAN
            } else {
                1.0
            };
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let xs = Tensor::new(&[x], &Device::Cpu)?.to_dtype(dtype)?;
                for op in ops(dtype) {
                    let got = world
                        .all_reduce(&xs, op)?
                        .to_dtype(DType::F32)?
                        .to_vec1::<f32>()?;
                    assert!(got[0].is_nan(), "{op} {dtype:?}");
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn half_precision_is_accumulated_in_f32() -> Result<()> {
    let sums = launch::threads(4, |world| {
        // 256 + 1 rounds to 256 in bf16, so rounding at each step would give 256.
        let x = if world.rank() == 0 { 256f32 } else { 1.0 };
        let xs = Tensor::new(&[x], &Device::Cpu)?.to_dtype(DType::BF16)?;
        world
            .all_reduce(&xs, ReduceOp::Sum)?
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()
    })?;
    assert_eq!(sums, vec![vec![260.0]; 4]);
    Ok(())
}

#[test]
fn integers_wrap() -> Result<()> {
    let sums = launch::threads(2, |world| {
        world
            .all_reduce(&Tensor::new(&[200u8], &Device::Cpu)?, ReduceOp::Sum)?
            .to_vec1::<u8>()
    })?;
    assert_eq!(sums, vec![vec![144]; 2]);
    Ok(())
}

#[test]
fn ranks_return_in_rank_order_from_named_threads() -> Result<()> {
    let names = launch::threads(3, |world| {
        assert!(world.device().is_cpu());
        Ok((
            world.rank(),
            std::thread::current().name().map(str::to_string),
        ))
    })?;
    assert_eq!(
        names,
        (0..3)
            .map(|rank| (rank, Some(format!("rank-{rank}"))))
            .collect::<Vec<_>>()
    );
    Ok(())
}

#[test]
fn deep_recursion_fits_the_stack() -> Result<()> {
    /// Needs more than 4 KiB of stack per call.
    fn depth(n: usize) -> usize {
        let page = std::hint::black_box([1u8; 4096]);
        if n == 0 {
            0
        } else {
            depth(n - 1) + usize::from(page[n % 4096])
        }
    }
    assert_eq!(launch::threads(1, |_| Ok(depth(8000)))?, [8000]);
    Ok(())
}

#[test]
fn started_operations_progress_while_the_rank_computes() -> Result<()> {
    launch::threads(2, |world| {
        let xs = input(1, world.rank(), &[1 << 20], DType::F32)?;
        let pending = world.start_all_reduce(&xs, ReduceOp::Sum)?;
        world.barrier()?;
        std::thread::sleep(std::time::Duration::from_millis(300));
        let started = std::time::Instant::now();
        pending.wait()?;
        assert!(
            started.elapsed().as_millis() < 150,
            "the work was left for the wait"
        );
        Ok(())
    })?;
    Ok(())
}

/// A started barrier lets other operations run beside it, and is complete only when the last rank has started it.
#[test]
fn a_started_barrier_waits_for_the_last_rank() -> Result<()> {
    let last_has_started = AtomicUsize::new(0);
    launch::threads(3, |world| {
        let rank = Tensor::new(&[world.rank() as u32], &Device::Cpu)?;
        if world.rank() == 2 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            last_has_started.store(1, Ordering::SeqCst);
        }
        let barrier = world.start_barrier()?;
        let all = world.start_all_gather(&rank)?;
        barrier.wait()?;
        assert_eq!(last_has_started.load(Ordering::SeqCst), 1);
        assert_eq!(all.wait()?.to_vec1::<u32>()?, [0, 1, 2]);
        Ok(())
    })?;
    Ok(())
}
