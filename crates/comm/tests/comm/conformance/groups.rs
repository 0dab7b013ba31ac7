//! Operations together: groups of groups, many in flight, views, storages, counters.

use candle_comm::{P2p, Pending, ReduceOp};
use candle_core::{DType, Device, Result, Tensor};

use super::Launch;
use crate::reference::{assert_same, cat, input, inputs, on, part, reduce};

/// Groups of groups, ordered by key, used in turns with the world.
pub fn splits(launch: &impl Launch) -> Result<()> {
    for &world_size in launch.world_sizes() {
        launch.run(world_size, |world| {
            let rank = world.rank();
            // Odd and even ranks, in reverse order.
            let half = world.split(rank % 2, world_size - rank)?;
            let members: Vec<usize> = (0..world_size)
                .rev()
                .filter(|r| r % 2 == rank % 2)
                .collect();
            assert_eq!(members[half.rank()], rank);
            assert_eq!(half.world_size(), members.len());
            // Equal keys keep the order.
            let same = half.split(7, 0)?;
            assert_eq!(
                (same.rank(), same.world_size()),
                (half.rank(), half.world_size())
            );
            let alone = world.split(rank, 0)?;
            assert_eq!((alone.rank(), alone.world_size()), (0, 1));
            for round in 0..4 {
                let all = inputs(10 + round, world_size, &[5], DType::F32)?;
                let theirs: Vec<Tensor> = members.iter().map(|r| all[*r].clone()).collect();
                let mine = on(&world, &all[rank])?;
                let a = half.start_all_gather(&mine)?;
                let b = world.start_all_reduce(&mine, ReduceOp::Sum)?;
                let c = same.start_all_reduce(&mine, ReduceOp::Sum)?;
                assert_same("same", &c.wait()?, &reduce(&theirs, ReduceOp::Sum)?)?;
                assert_same("world", &b.wait()?, &reduce(&all, ReduceOp::Sum)?)?;
                assert_same("half", &a.wait()?, &cat(&theirs, 0)?)?;
                assert_same(
                    "alone",
                    &alone.all_reduce(&mine, ReduceOp::Sum)?,
                    &all[rank],
                )?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Many operations in flight, waited for in an order of each rank's own; some are dropped.
pub fn many_in_flight(launch: &impl Launch) -> Result<()> {
    // Their sums are exact in whatever order a backend adds.
    let whole = |numbers: Tensor| numbers.to_dtype(DType::F32);
    launch.run(4, |world| {
        let rank = world.rank();
        let dims = |i: u64| {
            [if i.is_multiple_of(9) {
                80_000
            } else {
                4 * i as usize % 12
            }]
        };
        let mut pending: Vec<(u64, Pending<Tensor>)> = Vec::new();
        for i in 0..60 {
            let mine = on(&world, &whole(input(i, rank, &dims(i), DType::U32)?)?)?;
            pending.push((
                i,
                match i % 4 {
                    0 => world.start_all_reduce(&mine, ReduceOp::Sum)?,
                    1 => world.start_all_gather(&mine)?,
                    2 => world.start_reduce_scatter(&mine, ReduceOp::Max)?,
                    _ => world.start_broadcast(&mine, i as usize % 3)?,
                },
            ));
            // Gives up the result; the other ranks still get theirs, even if the input is overwritten now.
            if i % 4 == 0 && i as usize % 16 == 4 * rank {
                pending.pop();
                if i.is_multiple_of(9) {
                    mine.zero_set()?;
                }
            }
        }
        if rank % 2 == 1 {
            pending.reverse();
        }
        for (i, pending) in pending {
            let all = inputs(i, 4, &dims(i), DType::U32)?.into_iter();
            let all = all.map(whole).collect::<Result<Vec<_>>>()?;
            let expected = match i % 4 {
                0 => reduce(&all, ReduceOp::Sum)?,
                1 => cat(&all, 0)?,
                2 => part(&reduce(&all, ReduceOp::Max)?, 0, rank, 4)?,
                _ => all[i as usize % 3].clone(),
            };
            assert_same(&format!("operation {i}"), &pending.wait()?, &expected)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// The bytes that a ring moves, for every operation.
pub fn counters(launch: &impl Launch) -> Result<()> {
    for &world_size in launch.world_sizes() {
        launch.run(world_size, |world| {
            let n = world_size as u64;
            let xs = Tensor::zeros((world_size, 10), DType::F32, world.device())?;
            let size = n * 40;
            world.all_reduce(&xs, ReduceOp::Sum)?;
            world.start_all_reduce(&xs, ReduceOp::Sum)?.wait()?;
            world.all_gather(&xs, 1)?;
            world.reduce_scatter(&xs, ReduceOp::Sum, 0)?;
            world.broadcast(&xs, 0)?;
            world.all_to_all(&xs, 0)?;
            world.barrier()?;
            world.reduce(&xs, 0, ReduceOp::Sum)?;
            let mut sizes = vec![1; world_size];
            sizes[0] = 3;
            let rows = |num_rows| Tensor::zeros((num_rows, 10), DType::F32, world.device());
            let mine = rows(if world.rank() == 0 { world_size + 2 } else { 1 })?;
            world.scatter(&mine, &sizes, 0, 0)?;
            world.gather(&rows(sizes[world.rank()])?, &sizes, 0, 0)?;
            if world.rank() == 0 && n > 1 {
                world.batch_send_recv(&[
                    P2p::Send { xs: &xs, dst: 1 },
                    P2p::Send { xs: &xs, dst: 1 },
                ])?;
            } else if world.rank() == 1 {
                let recv = P2p::Recv {
                    shape: xs.shape().clone(),
                    dtype: DType::F32,
                    src: 0,
                };
                world.batch_send_recv(&[recv.clone(), recv])?;
            }
            let counters = world.counters();
            if n == 1 {
                assert_eq!(counters.iter().count(), 0, "a group of one counts nothing");
                return Ok(());
            }
            let ring = (n - 1) * size / n;
            let count = |name| (counters.calls(name), counters.bytes(name));
            assert_eq!(count("all_reduce"), (2, 2 * 2 * ring));
            assert_eq!(count("all_gather"), (1, ring * n));
            assert_eq!(count("reduce_scatter"), (1, ring));
            assert_eq!(count("broadcast"), (1, ring));
            assert_eq!(count("all_to_all"), (1, ring));
            assert_eq!(count("barrier"), (1, 0));
            assert_eq!(count("reduce"), (1, ring));
            let is_root = world.rank() == 0;
            assert_eq!(
                count("scatter"),
                (1, if is_root { (n - 1) * 40 } else { 0 })
            );
            assert_eq!(count("gather"), (1, if is_root { 0 } else { 40 }));
            let sends = [(1, 2 * size), (1, 0), (0, 0), (0, 0), (0, 0)];
            assert_eq!(count("batch_send_recv"), sends[world.rank()]);
            // Of integers all backends send as many bytes as they have.
            world.reset_counters();
            let codes = Tensor::zeros((world_size, 7), DType::U8, world.device())?;
            world.start_all_to_all(&codes)?.wait()?;
            world.start_all_gather(&codes)?.wait()?;
            world.start_all_gather_in_place(&codes)?.wait()?;
            let counters = world.counters();
            let count = |name| (counters.calls(name), counters.bytes(name));
            assert_eq!(count("all_to_all"), (1, 7 * (n - 1)));
            assert_eq!(count("all_gather"), (2, 7 * (n - 1) * (n + 1)));
            let half = world.split(0, 0)?;
            assert_eq!(
                half.counters().total().calls,
                0,
                "a split has counters of its own"
            );
            let clone = world.clone();
            clone.reset_counters();
            assert_eq!(
                world.counters().total().calls,
                0,
                "clones share their counters"
            );
            Ok(())
        })?;
    }
    Ok(())
}

/// Results are storages of their own: writing to one changes neither another rank's result nor an input, and what was
/// sent stays what it was.
pub fn independent_results(launch: &impl Launch) -> Result<()> {
    launch.run(3, |world| {
        let all = inputs(9, 3, &[6], DType::F32)?;
        let mine = on(&world, &all[world.rank()])?.copy()?;
        let zeros = Tensor::zeros(6, DType::F32, world.device())?;
        let results = [
            (
                world.all_reduce(&mine, ReduceOp::Sum)?,
                reduce(&all, ReduceOp::Sum)?,
            ),
            (world.broadcast(&mine, 1)?, all[1].clone()),
        ];
        for (got, expected) in &results {
            world.barrier()?;
            assert_same("before", got, expected)?;
            world.barrier()?;
            if world.rank() != 0 {
                got.slice_set(&zeros, 0, 0)?;
            }
            world.barrier()?;
            assert_same(
                "after",
                got,
                if world.rank() == 0 { expected } else { &zeros },
            )?;
            assert_same("input", &mine, &input(9, world.rank(), &[6], DType::F32)?)?;
        }
        let (next, src) = ((world.rank() + 1) % 3, (world.rank() + 2) % 3);
        let recv = P2p::Recv {
            shape: 6.into(),
            dtype: DType::F32,
            src,
        };
        let pending = world.start_batch_send_recv(&[
            P2p::Send {
                xs: &mine,
                dst: next,
            },
            recv,
        ])?;
        mine.slice_set(&zeros, 0, 0)?;
        assert_same(
            "sent",
            &pending.wait()?[0],
            &input(9, src, &[6], DType::F32)?,
        )
    })?;
    Ok(())
}

/// Views of larger tensors: transposed, and with an offset into a flat buffer.
pub fn views(launch: &impl Launch) -> Result<()> {
    launch.run(3, |world| {
        let all = inputs(8, 3, &[6, 4], DType::F32)?;
        let sum = reduce(&all, ReduceOp::Sum)?;
        let mine = &on(&world, &all[world.rank()])?;
        assert_same(
            "transposed",
            &world.all_reduce(&mine.t()?, ReduceOp::Sum)?,
            &sum.t()?,
        )?;
        let rows = |xs: &Tensor| xs.narrow(0, 2, 3);
        assert_same(
            "rows",
            &world.all_reduce(&rows(mine)?, ReduceOp::Sum)?,
            &rows(&sum)?,
        )?;
        let columns = |xs: &Tensor| xs.narrow(1, 1, 2);
        assert_same(
            "columns",
            &world.all_reduce(&columns(mine)?, ReduceOp::Sum)?,
            &columns(&sum)?,
        )?;
        let empty = on(&world, &Tensor::zeros((2, 0, 3), DType::F32, &Device::Cpu)?)?;
        let empty = empty.narrow(2, 1, 2)?.transpose(0, 2)?;
        assert_eq!(world.all_reduce(&empty, ReduceOp::Sum)?.dims(), [2, 0, 2]);
        assert_eq!(world.all_gather(&empty, 2)?.dims(), [2, 0, 6]);
        let next = (world.rank() + 1) % 3;
        let src = (world.rank() + 2) % 3;
        let send = P2p::Send {
            xs: &columns(mine)?,
            dst: next,
        };
        let got = world.batch_send_recv(&[
            send,
            P2p::Recv {
                shape: (6, 2).into(),
                dtype: DType::F32,
                src,
            },
        ])?;
        assert_same("sent columns", &got[0], &columns(&all[src])?)
    })?;
    Ok(())
}
