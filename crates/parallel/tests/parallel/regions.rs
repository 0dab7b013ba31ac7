//! Every region: what goes forward, and that backward is its conjugate.

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor};
use candle_parallel::regions::{
    copy_to_tensor_parallel_region, gather_parts, reduce_from_tensor_parallel_region,
};

use crate::check::{assert_close, grads, own_part, random, var};
use crate::device::on_ranks;

/// Σ over the ranks of `random(seed + rank)`.
fn sum(seed: u64, shape: (usize, usize, usize), tp: &ProcessGroup) -> Result<Tensor> {
    let mut sum = random(seed, shape)?;
    for rank in 1..tp.world_size() as u64 {
        sum = (sum + random(seed + rank, shape)?)?;
    }
    Ok(sum)
}

/// Runs `region` on each of 1 to 4 ranks.
fn on_each(check: impl Fn(&ProcessGroup) -> Result<()> + Sync) {
    for tp in 1..=4 {
        on_ranks(tp, |tp| check(&tp));
    }
}

#[test]
fn copy_forward_reduce_backward() {
    on_each(|tp| {
        let (shape, rank) = ((2, 3, 5), tp.rank() as u64);
        let x = var(&random(1, shape)?)?;
        let y = copy_to_tensor_parallel_region(&x, tp)?;
        assert_close("y", &y, &x);
        let [dx] = grads(&y, &random(10 + rank, shape)?, [&x])?;
        assert_close("dx", &dx, &sum(10, shape, tp)?);
        Ok(())
    });
}

#[test]
fn reduce_forward_copy_backward() {
    on_each(|tp| {
        let (shape, rank) = ((2, 3, 5), tp.rank() as u64);
        let x = var(&random(20 + rank, shape)?)?;
        let y = reduce_from_tensor_parallel_region(&x, tp)?;
        assert_close("y", &y, &sum(20, shape, tp)?);
        let dy = random(10, shape)?;
        assert_close("dx", &grads(&y, &dy, [&x])?[0], &dy);
        Ok(())
    });
}

#[test]
fn gather_joins_uneven_parts() {
    for global in [4, 5, 7, 11] {
        on_each(|tp| {
            let whole = random(1, (2, 3, global))?;
            let joined = gather_parts(&own_part(&whole, 2, tp)?, global, tp)?;
            assert_close("joined", &joined, &whole);
            assert!(!joined.track_op());
            Ok(())
        });
    }
}
