//! What is special to ranks over NCCL: streams, the contract of reductions, a world of one.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use candle_comm::{
    Communicator, HalfSums, Message, NcclCommunicator, NcclConfig, Operation, P2p, ReduceOp,
    Request,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::nccl::{Board, devices, each, each_with};
use crate::reference::{DTYPES, assert_same, input, on};

const LONG: Duration = Duration::from_secs(60);

/// A communicator of one rank asks NCCL for every operation; a `ProcessGroup` of one asks for none.
#[test]
fn a_world_of_one() -> Result<()> {
    for device in devices(1) {
        let board = Arc::new(Board::default());
        let world = NcclCommunicator::join(&NcclConfig::new(0, 1, device, board.exchange(0)))?;
        assert_eq!((world.rank(), world.world_size()), (0, 1));
        let members: Arc<[usize]> = Arc::new([0]);
        for dtype in DTYPES {
            for (seed, len) in [(1, 1), (2, 7), (3, 4099)] {
                let expected = input(seed, 0, &[len], dtype)?;
                let xs = expected.to_device(world.device())?;
                let operations = [
                    Operation::AllReduce(ReduceOp::Sum),
                    Operation::AllReduce(ReduceOp::Max),
                    Operation::ReduceScatter(ReduceOp::Sum),
                    Operation::ReduceScatter(ReduceOp::Max),
                    Operation::AllGather,
                    Operation::Broadcast { root: 0 },
                    Operation::AllToAll,
                    Operation::Reduce {
                        op: ReduceOp::Min,
                        root: 0,
                    },
                    Operation::Scatter {
                        root: 0,
                        sizes: Arc::new([len]),
                    },
                    Operation::Gather {
                        root: 0,
                        sizes: Arc::new([len]),
                    },
                    Operation::Messages {
                        name: "batch_send_recv",
                        messages: Arc::new([
                            Message::Send { xs: (), dst: 0 },
                            Message::Recv {
                                shape: xs.shape().clone(),
                                dtype,
                                src: 0,
                            },
                        ]),
                    },
                ];
                for operation in operations {
                    let xs = std::slice::from_ref(&xs);
                    let got = world
                        .start(&mut Request::new(&operation, xs, None, (&members, None)))?
                        .wait()?;
                    assert_same(&operation.to_string(), &got[0], &expected)?;
                }
            }
        }
        let nothing = Tensor::zeros(1, DType::U8, world.device())?.narrow(0, 0, 0)?;
        let nothing = [nothing];
        let mut barrier = Request::new(&Operation::Barrier, &nothing, None, (&members, None));
        world.start(&mut barrier)?.wait()?;
        assert_eq!(world.subgroup(&[0], &[0])?.world_size(), 1);
        world.check()?;
    }
    Ok(())
}

/// Every rank keeps its stream busy before the operation, so that an operation that does not wait for it would read too early;
/// overwrites or frees its input right after the wait, or after it has dropped the operation; and reads results at once.
#[test]
fn streams_wait_for_each_other() -> Result<()> {
    let results = each(2, LONG, |world| {
        let ones = Tensor::ones(30_000, DType::F32, world.device())?;
        for round in 1..=6 {
            let mut xs = ones.zeros_like()?;
            for _ in 0..4 * round {
                xs = (xs + &ones)?;
            }
            let dropped = xs.copy()?;
            drop(world.start_all_reduce(&dropped, ReduceOp::Sum)?);
            dropped.zero_set()?;
            drop(dropped);
            let pending = [
                world.start_all_reduce(&xs, ReduceOp::Sum)?,
                world.start_broadcast(&xs, round % 2)?,
                world.start_all_gather(&xs)?,
            ];
            let dst = 1 - world.rank();
            let recv = P2p::Recv {
                shape: xs.shape().clone(),
                dtype: DType::F32,
                src: dst,
            };
            let sent = xs.copy()?;
            let messages = world.start_batch_send_recv(&[P2p::Send { xs: &sent, dst }, recv])?;
            sent.zero_set()?;
            let mut results = Vec::new();
            for pending in pending {
                results.push(pending.wait()?);
            }
            xs.zero_set()?;
            drop(xs);
            // Writes to what the results were made from come after them.
            let noise = ones.affine(0.0, -1.0)?;
            results.extend(messages.wait()?);
            for (ys, expected) in results.iter().zip([8, 4, 4, 4]) {
                let ys = ys.to_vec1::<f32>()?;
                assert!(
                    ys.iter().all(|y| *y == (expected * round) as f32),
                    "round {round}"
                );
            }
            drop(noise);
        }
        Ok(())
    });
    results.into_iter().collect()
}

/// Rank 0 reads what it has computed before rank 1 takes what it has sent, and before rank 1 comes to the second of two reductions, of
/// which rank 0 has dropped the first.
#[test]
fn what_a_rank_computes_waits_for_no_send_and_no_later_operation() -> Result<()> {
    let has_read = Barrier::new(2);
    let results = each(2, Duration::from_secs(10), |world| {
        let ones = Tensor::ones(30_000, DType::F32, world.device())?;
        let computes = || -> Result<()> {
            let twos = (&ones + &ones)?.to_vec1::<f32>()?;
            assert!(twos.iter().all(|x| *x == 2.0));
            Ok(())
        };
        if world.rank() == 0 {
            let xs = (&ones * 3.0)?;
            let send = P2p::Send { xs: &xs, dst: 1 };
            world.start_batch_send_recv(&[send])?.wait()?;
            xs.zero_set()?;
            computes()?;
        }
        has_read.wait();
        if world.rank() == 1 {
            let shape = ones.shape().clone();
            let (dtype, src) = (DType::F32, 0);
            let recv = P2p::Recv { shape, dtype, src };
            let received = world.start_batch_send_recv(&[recv])?.wait()?;
            assert!(received[0].to_vec1::<f32>()?.iter().all(|x| *x == 3.0));
        }
        let first = world.start_all_reduce(&ones, ReduceOp::Sum)?;
        let second = match world.rank() {
            0 => {
                let second = world.start_all_reduce(&ones, ReduceOp::Sum)?;
                drop(first);
                computes()?;
                has_read.wait();
                second
            }
            _ => {
                first.wait()?;
                has_read.wait();
                world.start_all_reduce(&ones, ReduceOp::Sum)?
            }
        };
        let sum = second.wait()?.to_vec1::<f32>()?;
        assert!(sum.iter().all(|x| *x == 2.0));
        world.check()
    });
    results.into_iter().collect()
}

#[test]
fn reductions_keep_their_contract() -> Result<()> {
    let results = each(3, LONG, |world| {
        for dtype in [DType::BF16, DType::F16] {
            // 256 + 1 rounds to 256 in bf16, and 2048 + 1 to 2048 in f16: summed one by one, nothing would change.
            let large = if dtype == DType::BF16 { 256f32 } else { 2048.0 };
            let x = if world.rank() == 0 { large } else { 1.0 };
            let xs = Tensor::new(&[x, x, x], &Device::Cpu)?.to_dtype(dtype)?;
            let xs = on(&world, &xs)?;
            let third = |xs: Tensor| (xs.to_dtype(DType::F32)? * 3.0)?.to_dtype(dtype);
            for sum in [
                world.all_reduce(&xs, ReduceOp::Sum)?,
                world.reduce_scatter(&xs, ReduceOp::Sum, 0)?,
                third(world.all_reduce(&xs, ReduceOp::Avg)?)?,
            ] {
                let sum = sum.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                assert!(
                    sum.to_vec1::<f32>()?.iter().all(|y| *y == large + 2.0),
                    "{sum}"
                );
            }
        }
        for nan_rank in 0..3 {
            let x = if world.rank() == nan_rank {
                f32::NAN
            } else {
                -1.0
            };
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                let xs = Tensor::new(&[x, -2.0, f32::NEG_INFINITY], &Device::Cpu)?;
                let xs = on(&world, &xs.to_dtype(dtype)?)?;
                let max = world
                    .all_reduce(&xs, ReduceOp::Max)?
                    .to_device(&Device::Cpu)?;
                let max = max.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                assert!(
                    max[0].is_nan() && max[1..] == [-2.0, f32::NEG_INFINITY],
                    "{dtype:?}: {max:?}"
                );
                let min = world.all_reduce(&xs, ReduceOp::Min)?;
                let min = min.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                let min = min.to_vec1::<f32>()?;
                assert!(
                    min[0].is_nan() && min[1..] == [-2.0, f32::NEG_INFINITY],
                    "{dtype:?}: {min:?}"
                );
                let part = world
                    .reduce_scatter(&xs, ReduceOp::Max, 0)?
                    .to_device(&Device::Cpu)?;
                let part = part.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                assert_eq!(part[0].is_nan(), world.rank() == 0);
            }
        }
        let xs = Tensor::new(&[100u8 + world.rank() as u8], world.device())?;
        assert_eq!(world.all_reduce(&xs, ReduceOp::Sum)?.to_vec1::<u8>()?, [47]);
        Ok(())
    });
    results.into_iter().collect()
}

/// The sums differ whatever the order in which three ranks are added, and the bytes with them, in a split too.
#[test]
fn half_sums_are_made_as_asked_and_counted_as_sent() -> Result<()> {
    // Values of the ranks, their sum rounded once, and rounded after each addition.
    let sums = [
        (DType::BF16, [111.0, 94.5, 672.0], 876.0, 880.0),
        (DType::F16, [559.5, 2664.0, 2558.0], 5780.0, 5784.0),
    ];
    for (half_sums, bytes_per_value) in [(HalfSums::F32, 4), (HalfSums::Native, 2)] {
        let results = each_with(3, (LONG, half_sums), |world| {
            for world in [world.split(0, world.rank())?, world] {
                for (dtype, values, once, native) in sums {
                    let want = match half_sums {
                        HalfSums::F32 => once,
                        HalfSums::Native => native,
                    };
                    let mine = Tensor::full(values[world.rank()], 6, &Device::Cpu)?;
                    let xs = on(&world, &mine.to_dtype(dtype)?)?;
                    world.reset_counters();
                    let sum = ReduceOp::Sum;
                    let whole = world.start_all_reduce(&xs, sum)?.wait()?;
                    let slice = world.start_reduce_scatter(&xs, sum)?.wait()?;
                    let place = xs.copy()?;
                    let own = world.start_reduce_scatter_in_place(&place, sum)?.wait()?;
                    let place = xs.copy()?;
                    let same = world.start_all_reduce_in_place(&place, sum)?.wait()?;
                    for (got, len) in [(whole, 6), (slice, 2), (own, 2), (same, 6)] {
                        let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
                        assert_eq!(got.to_vec1::<f64>()?, vec![want; len], "{dtype:?}");
                    }
                    let counters = world.counters();
                    let once = 6 * bytes_per_value * 2 / 3;
                    assert_eq!(counters.bytes("all_reduce"), 2 * 2 * once);
                    assert_eq!(counters.bytes("reduce_scatter"), 2 * once);
                    world.reset_counters();
                    world.all_reduce(&xs, ReduceOp::Max)?;
                    world.all_gather(&xs, 0)?;
                    // A maximum takes a mask along, a gathering nothing.
                    let counters = world.counters();
                    assert_eq!(counters.bytes("all_reduce"), 2 * 6 * 3 * 2 / 3);
                    assert_eq!(counters.bytes("all_gather"), 18 * 2 * 2 / 3);
                }
            }
            Ok(())
        });
        results.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

#[test]
fn small_integers_travel_but_are_not_reduced() -> Result<()> {
    let results = each(2, LONG, |world| {
        let rank = world.rank();
        let xs = Tensor::new(&[rank as i16, -1], world.device())?;
        assert_eq!(world.all_gather(&xs, 0)?.to_vec1::<i16>()?, [0, -1, 1, -1]);
        let error = world
            .all_reduce(&xs, ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("all_reduce(sum) of i16 works on the CPU only"),
            "{error}"
        );
        let xs = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
        let error = world
            .all_reduce(&xs, ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(error.contains(" its device, got one on cpu"), "{error}");
        Ok(())
    });
    results.into_iter().collect()
}

/// The host's barrier: a rank is past it only when all have started it.
#[test]
fn a_barrier_waits_on_the_host() -> Result<()> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let arrived = AtomicUsize::new(0);
    let results = each(3, LONG, |world| {
        for round in 1..=5 {
            std::thread::sleep(Duration::from_millis(
                5 * ((world.rank() + round) % 3) as u64,
            ));
            arrived.fetch_add(1, Ordering::SeqCst);
            world.barrier()?;
            assert!(arrived.load(Ordering::SeqCst) >= 3 * round);
        }
        Ok(())
    });
    results.into_iter().collect()
}
