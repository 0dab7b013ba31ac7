//! Messages between two ranks, and byte strings.

use candle_comm::P2p;
use candle_core::{DType, Result, Shape};

use super::{Launch, for_all};
use crate::reference::{assert_same, input, on};

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
                (*dst, on(world, &message(rank, *dst, 0)?)?),
                (*dst, on(world, &message(rank, *dst, 1)?)?),
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

/// Messages of several batches arrive in the order of the sends, whatever the order of the waits; a receive that is
/// dropped takes its message with it.
pub fn message_order(launch: &impl Launch) -> Result<()> {
    launch.run(2, |world| {
        let peer = 1 - world.rank();
        let mut pending = Vec::new();
        for i in 0..20 {
            let xs = on(&world, &input(i, world.rank(), &[3], DType::F32)?)?;
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
    for &world_size in launch.world_sizes() {
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
