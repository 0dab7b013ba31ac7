//! What is special to ranks on GPUs: streams, devices, dtypes, faults.

use std::time::Duration;

use candle_comm::{LocalConfig, P2p, ProcessGroup, ReduceOp, launch};
use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::{DType, Device, Result, Tensor};

use crate::cuda::{gpus, on_gpus};
use crate::reference::{input, on};

#[test]
fn results_live_on_the_ranks_device() -> Result<()> {
    for threads in on_gpus(None) {
        let config = LocalConfig {
            threads_per_rank: Some(2),
            ..threads.config(3)
        };
        launch::threads_with(config, |world| {
            let device = world.device();
            let xs = on(&world, &input(1, world.rank(), &[3, 2], DType::F32)?)?;
            let recv = P2p::Recv {
                shape: xs.shape().clone(),
                dtype: DType::F32,
                src: (world.rank() + 2) % 3,
            };
            let dst = (world.rank() + 1) % 3;
            let mut results = world.batch_send_recv(&[P2p::Send { xs: &xs, dst }, recv])?;
            results.extend([
                world.all_reduce(&xs, ReduceOp::Sum)?,
                world.all_gather(&xs, 1)?,
                world.reduce_scatter(&xs, ReduceOp::Max, 0)?,
                world.broadcast(&xs, 2)?,
                world.all_to_all(&xs, 0)?,
                world.all_gather(
                    &on(&world, &Tensor::zeros(0, DType::F32, &Device::Cpu)?)?,
                    0,
                )?,
            ]);
            // The last rank to come works for all.
            std::thread::sleep(Duration::from_millis(if world.rank() == 1 {
                20
            } else {
                0
            }));
            results.push(world.all_reduce(&xs, ReduceOp::Sum)?);
            for ys in results {
                assert!(ys.device().same_device(device), "{:?}", ys.device());
            }
            // Work and cleaning up for other ranks leave its threads with the rank's own GPU.
            let stream = device.as_cuda_device()?.cuda_stream();
            let is_current =
                || result::ctx::get_current().is_ok_and(|c| c == Some(stream.context().cu_ctx()));
            assert!(is_current());
            assert_eq!(rayon::broadcast(|_| is_current()), [true, true]);
            Ok(())
        })?;
    }
    Ok(())
}

/// The thread that launched ranks may have never used a GPU, and frees what they return.
#[test]
fn the_launching_thread_can_free_results() -> Result<()> {
    for threads in on_gpus(None) {
        let launched = std::thread::spawn(move || -> Result<()> {
            let ones = |world: ProcessGroup| Tensor::ones(3, DType::F32, world.device());
            drop(launch::threads_with(threads.config(2), ones)?);
            let stream = threads.devices[0].as_cuda_device()?.cuda_stream();
            let context = stream.context().cu_ctx();
            assert!(result::ctx::get_current().is_ok_and(|c| c == Some(context)));
            Ok(())
        });
        launched.join().unwrap()?;
    }
    Ok(())
}

/// Every rank keeps its stream busy before the operation, so that a copy that does not wait for it would read too early;
/// and frees or overwrites its input right after.
#[test]
fn streams_wait_for_each_other() -> Result<()> {
    for threads in on_gpus(None) {
        launch::threads_with(threads.config(2), |world| {
            let ones = Tensor::ones(30_000, DType::F32, world.device())?;
            for round in 1..=3 {
                let mut xs = ones.zeros_like()?;
                for _ in 0..4 * round {
                    xs = (xs + &ones)?;
                }
                let pending = [
                    world.start_all_reduce(&xs, ReduceOp::Sum)?,
                    world.start_broadcast(&xs, round % 2)?,
                ];
                let dst = 1 - world.rank();
                let recv = P2p::Recv {
                    shape: xs.shape().clone(),
                    dtype: DType::F32,
                    src: dst,
                };
                let got = world.batch_send_recv(&[P2p::Send { xs: &xs, dst }, recv])?;
                let [sum, same] = pending.map(|pending| pending.wait());
                xs.zero_set()?;
                drop(xs);
                let n = 4 * round;
                for (ys, expected) in [(sum?, 2 * n), (same?, n), (got[0].clone(), n)] {
                    let ys = ys.to_vec1::<f32>()?;
                    assert!(ys.iter().all(|y| *y == expected as f32));
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_nan_on_one_rank_is_seen_by_all() -> Result<()> {
    for threads in on_gpus(None) {
        for nan_rank in 0..3 {
            launch::threads_with(threads.config(3), |world| {
                let x = match world.rank() == nan_rank {
                    true => f32::NAN,
                    false => 1.0,
                };
                for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                    let xs = Tensor::new(&[x, 2.0], &Device::Cpu)?.to_dtype(dtype)?;
                    let max = world.all_reduce(&on(&world, &xs)?, ReduceOp::Max)?;
                    let max = max.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                    let max = max.to_vec1::<f32>()?;
                    assert!(max[0].is_nan() && max[1] == 2.0, "{dtype:?}: {max:?}");
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn half_precision_is_accumulated_in_f32_and_integers_wrap() -> Result<()> {
    for threads in on_gpus(None) {
        launch::threads_with(threads.config(4), |world| {
            for dtype in [DType::BF16, DType::F16] {
                // 256 + 1 rounds to 256 in bf16, and 2048 + 1 to 2048 in f16.
                let large = if dtype == DType::BF16 { 256f32 } else { 2048.0 };
                let x = if world.rank() == 0 { large } else { 4.0 / 3.0 };
                let xs = Tensor::new(&[x], &Device::Cpu)?.to_dtype(dtype)?;
                let sum = world.all_reduce(&on(&world, &xs)?, ReduceOp::Sum)?;
                let sum = sum.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                assert_eq!(sum.to_vec1::<f32>()?, [large + 4.0]);
            }
            let xs = Tensor::new(&[100u8], world.device())?;
            let sum = world.all_reduce(&xs, ReduceOp::Sum)?;
            assert_eq!(sum.to_vec1::<u8>()?, [144]);
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn small_integers_travel_but_are_not_reduced() -> Result<()> {
    for threads in on_gpus(None) {
        launch::threads_with(threads.config(2), |world| {
            let xs = Tensor::new(&[world.rank() as i32, -1], world.device())?;
            let all = world.all_gather(&xs, 0)?.to_vec1::<i32>()?;
            assert_eq!(all, [0, -1, 1, -1]);
            let error = world.all_reduce(&xs, ReduceOp::Sum).unwrap_err();
            assert_eq!(
                error.to_string(),
                "all_reduce(sum) of i32 works on the CPU only: candle adds and compares no such integers on GPUs\n\
                 hint: use i64 or u32"
            );
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_tensor_on_another_device_is_named() -> Result<()> {
    let [first, .., again] = gpus() else {
        return Ok(());
    };
    let config = LocalConfig {
        devices: vec![first.clone()],
        ..LocalConfig::new(2)
    };
    launch::threads_with(config, |world| {
        let xs = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
        let error = world.all_reduce(&xs, ReduceOp::Sum).unwrap_err();
        let expected = format!(
            "rank {} exchanges tensors on cuda:0, its device, got one on cpu\nhint: ",
            world.rank()
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
        let xs = xs.to_device(again)?;
        let dst = 1 - world.rank();
        let error = world.batch_send_recv(&[P2p::Send { xs: &xs, dst }]);
        let error = error.unwrap_err().to_string();
        let expected = "got one on cuda:0 opened a second time, with another stream";
        assert!(error.contains(expected), "{error}");
        Ok(())
    })?;
    Ok(())
}

#[test]
fn devices_that_ranks_cannot_share() -> Result<()> {
    let [first, ..] = gpus() else {
        return Ok(());
    };
    let refusal = |devices: Vec<Device>| {
        let config = LocalConfig {
            devices,
            ..LocalConfig::new(2)
        };
        let error = launch::threads_with(config, |_| Ok(())).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        refusal(vec![first.clone(), Device::Cpu]),
        "the ranks of a run are all on the CPU or all on GPUs, got cuda:0 and cpu"
    );
    let error = refusal(vec![Device::new_cuda(0)?]);
    assert!(
        error.starts_with("ranks cannot share cuda:0: it was opened with a stream for each thread"),
        "{error}"
    );
    Ok(())
}

/// A missing rank, a mismatch, a failure and dropped results: the others get their sentences, and the GPU goes on.
#[test]
fn faults_with_tensors_on_gpus() -> Result<()> {
    for threads in on_gpus(Some(3)) {
        let ones = |device: &Device| Tensor::ones(1000, DType::F32, device);
        launch::threads_with(threads.config(3), |world| {
            let xs = ones(world.device())?;
            let shape = if world.rank() == 1 { 500 } else { 1000 };
            let error = world.all_reduce(&xs.narrow(0, 0, shape)?, ReduceOp::Sum);
            let error = error.unwrap_err().to_string();
            assert!(
                error.contains("ranks disagree in group [0, 1, 2]"),
                "{error}"
            );
            for _ in 0..3 {
                drop(world.start_all_reduce(&xs, ReduceOp::Sum)?);
                let dropped = xs.copy()?;
                drop(world.start_all_gather(&dropped)?);
                dropped.zero_set()?;
            }
            let sum = world.all_reduce(&xs, ReduceOp::Sum)?.to_vec1::<f32>()?;
            assert_eq!(sum, [3.0; 1000]);
            Ok(())
        })?;
        let config = LocalConfig {
            deadline: Duration::from_millis(200),
            ..threads.config(2)
        };
        let missing = launch::threads_with(config, |world| {
            if world.rank() == 1 {
                std::thread::sleep(Duration::from_millis(400));
                return Ok(());
            }
            world
                .all_reduce(&ones(world.device())?, ReduceOp::Sum)
                .map(|_| ())
        });
        let missing = missing.unwrap_err().to_string();
        assert!(missing.contains("not arrived: rank 1"), "{missing}");
        let failed = launch::threads_with(threads.config(2), |world| {
            let pending = world.start_all_reduce(&ones(world.device())?, ReduceOp::Sum)?;
            assert!(world.rank() == 0, "on purpose");
            pending.wait()?;
            world.barrier()
        });
        let failed = failed.unwrap_err().to_string();
        assert_eq!(failed, "rank 1 failed: panicked: on purpose");
    }
    Ok(())
}
