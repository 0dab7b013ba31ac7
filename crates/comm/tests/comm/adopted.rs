//! What ranks that are threads allocate for each other counts for the one that frees it.

use candle_comm::{MIN_ADOPTED_BYTES, P2p, ReduceOp, adopted_bytes, launch};
use candle_core::{DType, Device, Result, Tensor};

fn tensor(bytes: usize) -> Result<Tensor> {
    Tensor::ones(bytes / 4, DType::F32, &Device::Cpu)
}

/// A collective whose results the last rank to come allocates, and one that is done in the background.
const SIZES: [usize; 2] = [MIN_ADOPTED_BYTES, 1 << 20];

#[test]
fn results_of_collectives_are_those_of_their_ranks() -> Result<()> {
    for bytes in SIZES {
        let adopted = launch::threads(3, |world| {
            let xs = tensor(bytes)?;
            world.all_reduce(&xs, ReduceOp::Sum)?;
            let of_reduce = adopted_bytes();
            world.all_gather(&xs, 0)?;
            let of_gather = adopted_bytes() - of_reduce;
            let start = adopted_bytes();
            world
                .start_all_reduce_in_place(&xs, ReduceOp::Sum)?
                .wait()?;
            world.all_reduce(&tensor(MIN_ADOPTED_BYTES - 4)?, ReduceOp::Sum)?;
            assert_eq!(adopted_bytes(), start);
            Ok([of_reduce, of_gather])
        })?;
        for (index, all) in [bytes as i64, 3 * bytes as i64].into_iter().enumerate() {
            let mut adopted: Vec<i64> = adopted.iter().map(|of_rank| of_rank[index]).collect();
            adopted.sort_unstable();
            let expected = match bytes {
                MIN_ADOPTED_BYTES => [-2 * all, all, all],
                _ => [all; 3],
            };
            assert_eq!(adopted, expected, "{bytes}");
        }
    }
    Ok(())
}

#[test]
fn a_result_that_nobody_wants_is_nobodys() -> Result<()> {
    launch::threads(2, |world| {
        let xs = tensor(SIZES[1])?;
        drop(world.start_all_reduce(&xs, ReduceOp::Sum)?);
        assert_eq!(adopted_bytes(), 0);
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_message_goes_over_to_its_receiver() -> Result<()> {
    let adopted = launch::threads(2, |world| {
        let xs = tensor(SIZES[0])?;
        let op = match world.rank() {
            0 => P2p::Send { xs: &xs, dst: 1 },
            _ => P2p::Recv {
                shape: xs.shape().clone(),
                dtype: xs.dtype(),
                src: 0,
            },
        };
        world.batch_send_recv(&[op])?;
        Ok(adopted_bytes())
    })?;
    let bytes = SIZES[0] as i64;
    assert_eq!(adopted, [-bytes, bytes]);
    Ok(())
}
