//! What every backend must pass: each operation against its naive reference.

use candle_comm::{P2p, Pending, ProcessGroup, ReduceOp};
use candle_core::{D, DType, Device, Result, Shape, Tensor};

use crate::reference::{DTYPES, assert_same, cat, input, inputs, part, reduce};

/// A way to run ranks.
pub trait Launch {
    fn run<T: Send>(
        &self,
        world_size: usize,
        run: impl Fn(ProcessGroup) -> Result<T> + Sync,
    ) -> Result<Vec<T>>;
}

const WORLD_SIZES: [usize; 5] = [1, 2, 3, 4, 5];
const OPS: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Max];

/// Calls `check(world, dims, dtype)` for every world size, dtype and small shape.
fn for_all(
    launch: &impl Launch,
    shapes: &[&[usize]],
    check: impl Fn(&ProcessGroup, &[usize], DType) -> Result<()> + Sync,
) -> Result<()> {
    for world_size in WORLD_SIZES {
        launch.run(world_size, |world| {
            assert_eq!(world.world_size(), world_size);
            for dtype in DTYPES {
                for dims in shapes {
                    check(&world, dims, dtype)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

pub fn all_reduce(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 7] = [&[], &[0], &[1], &[7], &[3, 5], &[2, 0, 3], &[4099]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for op in OPS {
            let all = inputs(1, world.world_size(), dims, dtype)?;
            let got = world.all_reduce(&all[world.rank()], op)?;
            assert_same(
                &format!("all_reduce({op}) {dims:?}"),
                &got,
                &reduce(&all, op)?,
            )?;
        }
        Ok(())
    })
}

pub fn all_gather(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 6] = [&[0], &[1], &[7], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for dim in 0..dims.len() {
            let all = inputs(2, world.world_size(), dims, dtype)?;
            let got = world.all_gather(&all[world.rank()], dim)?;
            assert_same(
                &format!("all_gather {dims:?} dim {dim}"),
                &got,
                &cat(&all, dim)?,
            )?;
        }
        Ok(())
    })
}

pub fn reduce_scatter(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[0], &[1], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for (dim, op) in (0..dims.len()).flat_map(|dim| OPS.map(|op| (dim, op))) {
            let mut dims = dims.to_vec();
            dims[dim] *= world.world_size();
            let all = inputs(3, world.world_size(), &dims, dtype)?;
            let got = world.reduce_scatter(&all[world.rank()], op, dim)?;
            let expected = part(&reduce(&all, op)?, dim, world.rank(), world.world_size())?;
            assert_same(
                &format!("reduce_scatter({op}) {dims:?} dim {dim}"),
                &got,
                &expected,
            )?;
        }
        Ok(())
    })
}

pub fn broadcast(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[], &[0], &[7], &[3, 5], &[4099]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for root in 0..world.world_size() {
            let mine = input(4, world.rank(), dims, dtype)?;
            let got = world.broadcast(&mine, root)?;
            assert_same(
                &format!("broadcast {dims:?} root {root}"),
                &got,
                &input(4, root, dims, dtype)?,
            )?;
        }
        Ok(())
    })
}

pub fn all_to_all(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[0], &[1], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for dim in 0..dims.len() {
            let n = world.world_size();
            let mut dims = dims.to_vec();
            dims[dim] *= n;
            let all = inputs(5, n, &dims, dtype)?;
            let got = world.all_to_all(&all[world.rank()], dim)?;
            let parts = all
                .iter()
                .map(|xs| part(xs, dim, world.rank(), n))
                .collect::<Result<Vec<_>>>()?;
            assert_same(
                &format!("all_to_all {dims:?} dim {dim}"),
                &got,
                &cat(&parts, dim)?,
            )?;
        }
        Ok(())
    })
}

/// Every rank sends two messages to every other rank, in one batch with its receives, listed in an order of its own.
pub fn batch_send_recv(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[], &[0], &[7], &[3, 5], &[4099]];
    for_all(launch, &shapes, |world, dims, dtype| {
        let (rank, n) = (world.rank(), world.world_size());
        let message = |src: usize, dst: usize, i: u64| input(6 + i, src * n + dst, dims, dtype);
        let peers: Vec<usize> = (1..n).map(|step| (rank + step) % n).collect();
        let mut sends = Vec::new();
        for dst in &peers {
            sends.extend([
                (*dst, message(rank, *dst, 0)?),
                (*dst, message(rank, *dst, 1)?),
            ]);
        }
        let recv = |src: &usize| P2p::Recv {
            shape: Shape::from(dims),
            dtype,
            src: *src,
        };
        let mut ops: Vec<P2p<'_>> = peers.iter().map(recv).collect();
        ops.extend(sends.iter().map(|(dst, xs)| P2p::Send { xs, dst: *dst }));
        ops.extend(peers.iter().map(recv));
        let got = world.batch_send_recv(&ops)?;
        assert_eq!(got.len(), 2 * peers.len());
        for (i, xs) in got.iter().enumerate() {
            let (src, number) = (peers[i % peers.len()], (i / peers.len()) as u64);
            assert_same(
                &format!("message {number} {src} -> {rank}"),
                xs,
                &message(src, rank, number)?,
            )?;
        }
        Ok(())
    })
}

/// Large enough for the work to be shared out or done in the background, with sizes that nothing divides.
pub fn large(launch: &impl Launch) -> Result<()> {
    for (world_size, dtype) in [(2, DType::F32), (3, DType::BF16), (5, DType::F32)] {
        launch.run(world_size, |world| {
            let (rank, n) = (world.rank(), world_size);
            let all = inputs(7, n, &[n * 60_013, 3], dtype)?;
            let sum = reduce(&all, ReduceOp::Sum)?;
            let mine = &all[rank];
            assert_same("all_reduce", &world.all_reduce(mine, ReduceOp::Sum)?, &sum)?;
            assert_same(
                "reduce_scatter",
                &world.reduce_scatter(mine, ReduceOp::Sum, 0)?,
                &part(&sum, 0, rank, n)?,
            )?;
            assert_same("all_gather", &world.all_gather(mine, 0)?, &cat(&all, 0)?)?;
            assert_same(
                "all_gather dim 1",
                &world.all_gather(mine, D::Minus1)?,
                &cat(&all, 1)?,
            )?;
            let parts = all
                .iter()
                .map(|xs| part(xs, 0, rank, n))
                .collect::<Result<Vec<_>>>()?;
            assert_same("all_to_all", &world.all_to_all(mine, 0)?, &cat(&parts, 0)?)?;
            assert_same("broadcast", &world.broadcast(mine, n - 1)?, &all[n - 1])
        })?;
    }
    Ok(())
}

/// Views of larger tensors: transposed, and with an offset into a flat buffer.
pub fn views(launch: &impl Launch) -> Result<()> {
    launch.run(3, |world| {
        let all = inputs(8, 3, &[6, 4], DType::F32)?;
        let sum = reduce(&all, ReduceOp::Sum)?;
        let mine = &all[world.rank()];
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
        let empty = Tensor::zeros((2, 0, 3), DType::F32, &Device::Cpu)?;
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

/// Results are storages of their own: writing to one changes neither another rank's result nor an input, and what was
/// sent stays what it was.
pub fn independent_results(launch: &impl Launch) -> Result<()> {
    launch.run(3, |world| {
        let all = inputs(9, 3, &[6], DType::F32)?;
        let mine = all[world.rank()].clone();
        let zeros = Tensor::zeros(6, DType::F32, &Device::Cpu)?;
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

/// Groups of groups, ordered by key, used in turns with the world.
pub fn splits(launch: &impl Launch) -> Result<()> {
    for world_size in WORLD_SIZES {
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
                let a = half.start_all_gather(&all[rank])?;
                let b = world.start_all_reduce(&all[rank], ReduceOp::Sum)?;
                let c = same.start_all_reduce(&all[rank], ReduceOp::Sum)?;
                assert_same("same", &c.wait()?, &reduce(&theirs, ReduceOp::Sum)?)?;
                assert_same("world", &b.wait()?, &reduce(&all, ReduceOp::Sum)?)?;
                assert_same("half", &a.wait()?, &cat(&theirs, 0)?)?;
                assert_same(
                    "alone",
                    &alone.all_reduce(&all[rank], ReduceOp::Sum)?,
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
            let mine = input(i, rank, &dims(i), DType::F32)?;
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
            let all = inputs(i, 4, &dims(i), DType::F32)?;
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

/// Messages of several batches arrive in the order of the sends, whatever the order of the waits; a receive that is
/// dropped takes its message with it.
pub fn message_order(launch: &impl Launch) -> Result<()> {
    launch.run(2, |world| {
        let peer = 1 - world.rank();
        let mut pending = Vec::new();
        for i in 0..20 {
            let xs = input(i, world.rank(), &[3], DType::F32)?;
            let recv = P2p::Recv {
                shape: 3.into(),
                dtype: DType::F32,
                src: peer,
            };
            let send = P2p::Send { xs: &xs, dst: peer };
            let ops = if world.rank() == 0 {
                [send, recv]
            } else {
                [recv, send]
            };
            pending.push((i, world.start_batch_send_recv(&ops)?));
            if i % 7 == 3 {
                pending.pop();
            }
        }
        while let Some((i, got)) = pending.pop() {
            assert_same(
                &format!("message {i}"),
                &got.wait()?[0],
                &input(i, peer, &[3], DType::F32)?,
            )?;
        }
        Ok(())
    })?;
    Ok(())
}

pub fn all_gather_bytes(launch: &impl Launch) -> Result<()> {
    for world_size in WORLD_SIZES {
        launch.run(world_size, |world| {
            for longest in [0, 1, 1000] {
                let bytes = |rank: usize| vec![rank as u8; longest * rank / world_size];
                let got = world.all_gather_bytes(&bytes(world.rank()))?;
                assert_eq!(got, (0..world_size).map(bytes).collect::<Vec<_>>());
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The bytes that a ring moves, for every operation.
pub fn counters(launch: &impl Launch) -> Result<()> {
    for world_size in WORLD_SIZES {
        launch.run(world_size, |world| {
            let n = world_size as u64;
            let xs = Tensor::zeros((world_size, 10), DType::F32, &Device::Cpu)?;
            let size = n * 40;
            world.all_reduce(&xs, ReduceOp::Sum)?;
            world.start_all_reduce(&xs, ReduceOp::Max)?.wait()?;
            world.all_gather(&xs, 1)?;
            world.reduce_scatter(&xs, ReduceOp::Sum, 0)?;
            world.broadcast(&xs, 0)?;
            world.all_to_all(&xs, 0)?;
            world.barrier()?;
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
            let sends = [(1, 2 * size), (1, 0), (0, 0), (0, 0), (0, 0)];
            assert_eq!(count("batch_send_recv"), sends[world.rank()]);
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
