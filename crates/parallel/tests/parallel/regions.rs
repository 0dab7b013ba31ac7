//! Every region: what goes forward, and that backward is its conjugate.

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor};
use candle_parallel::regions::{
    copy_to_tensor_parallel_region, gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region, gather_parts, reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region, scatter_to_tensor_parallel_region,
};

use crate::check::{assert_close, assert_says, grads, message, own_part, random, var};
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
fn scatter_and_gather_of_the_last_dim() {
    on_each(|tp| {
        let whole = random(1, (2, 3, 5 * tp.world_size()))?;
        let dy = random(2, (2, 3, 5 * tp.world_size()))?;
        let (mine, my_dy) = (own_part(&whole, 2, tp)?, own_part(&dy, 2, tp)?);

        let x = var(&whole)?;
        let y = scatter_to_tensor_parallel_region(&x, tp)?;
        assert_close("scattered", &y, &mine);
        assert_close("dx of scatter", &grads(&y, &my_dy, [&x])?[0], &dy);

        let x = var(&mine)?;
        let y = gather_from_tensor_parallel_region(&x, tp)?;
        assert_close("gathered", &y, &whole);
        assert_close("dx of gather", &grads(&y, &dy, [&x])?[0], &my_dy);
        Ok(())
    });
}

#[test]
fn gather_and_reduce_scatter_of_the_sequence() {
    on_each(|tp| {
        let (shape, rank) = ((2, 3 * tp.world_size(), 5), tp.rank() as u64);
        let whole = random(1, shape)?;
        let mine = own_part(&whole, 1, tp)?;

        let x = var(&mine)?;
        let y = gather_from_sequence_parallel_region(&x, tp)?;
        assert_close("gathered", &y, &whole);
        let [dx] = grads(&y, &random(10 + rank, shape)?, [&x])?;
        let expected = own_part(&sum(10, shape, tp)?, 1, tp)?;
        assert_close("dx of gather", &dx, &expected);

        let x = var(&random(20 + rank, shape)?)?;
        let y = reduce_scatter_to_sequence_parallel_region(&x, tp)?;
        let expected = own_part(&sum(20, shape, tp)?, 1, tp)?;
        assert_close("reduced and scattered", &y, &expected);
        let [dx] = grads(&y, &mine, [&x])?;
        assert_close("dx of reduce-scatter", &dx, &whole);
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

#[test]
fn a_last_dim_that_the_ranks_do_not_divide_is_an_error() {
    on_ranks(3, |tp| {
        let said = message(scatter_to_tensor_parallel_region(&random(1, (2, 7))?, &tp));
        assert_says(&said, &["[2, 7]", "3 tensor-parallel ranks", "7 is not"]);
        Ok(())
    });
}
