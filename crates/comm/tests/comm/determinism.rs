//! The same inputs give the same bits, however the ranks are timed.

use candle_comm::{P2p, ProcessGroup, ReduceOp, launch};
use candle_core::{DType, Result};

use crate::reference::{bits, input, on};
use crate::threads::Threads;

/// Steps of mixed operations, each fed with the results of the previous ones.
pub fn run(threads: &Threads) -> Result<Vec<Vec<u64>>> {
    launch::threads_with(threads.config(4), |world| steps(&world))
}

/// The same on one of four ranks.
pub fn steps(world: &ProcessGroup) -> Result<Vec<u64>> {
    let pair = world.split(world.rank() / 2, world.rank())?;
    let mut xs = on(world, &input(1, world.rank(), &[4, 501], DType::F32)?)?;
    let mut seen = Vec::new();
    for round in 0..6 {
        let sum = world.start_all_reduce(&xs, ReduceOp::Sum)?;
        let part = pair.reduce_scatter(&xs, ReduceOp::Sum, 0)?;
        let half = pair.all_gather(&part.to_dtype(DType::BF16)?, 0)?;
        let half = world
            .all_reduce(&half, ReduceOp::Sum)?
            .to_dtype(DType::F32)?;
        let next = (world.rank() + 1 + round % 3) % 4;
        let src = (world.rank() + 3 - round % 3) % 4;
        let recv = P2p::Recv {
            shape: xs.shape().clone(),
            dtype: DType::F32,
            src,
        };
        let sent = world.start_batch_send_recv(&[P2p::Send { xs: &xs, dst: next }, recv])?;
        xs = ((sum.wait()? * 0.1)? + (&sent.wait()?[0] * 0.5)?)?;
        xs = (xs + (half * 0.01)?)?;
        seen.extend(bits(&xs)?);
    }
    Ok(seen)
}

#[test]
fn delays_change_no_bit() -> Result<()> {
    let expected = run(&Threads::default())?;
    assert!(expected[0].iter().any(|x| f64::from_bits(*x) != 0.0));
    assert!(expected[0] != expected[1]);
    for seed in 0..8 {
        let threads = Threads {
            delays: Some(seed),
            ..Threads::default()
        };
        assert!(
            run(&threads)? == expected,
            "delays with seed {seed} changed the result"
        );
    }
    Ok(())
}

/// Large operations are shared out over cores, which must not change the order of additions either.
#[test]
fn sharing_out_changes_no_bit() -> Result<()> {
    let run = || {
        launch::threads(3, |world| {
            let xs = input(2, world.rank(), &[700_001], DType::F32)?;
            bits(&world.all_reduce(&xs, ReduceOp::Sum)?)
        })
    };
    let expected = run()?;
    assert!(expected[0] == expected[1] && expected[0] == expected[2]);
    assert!((0..3).all(|_| run().is_ok_and(|got| got == expected)));
    Ok(())
}
