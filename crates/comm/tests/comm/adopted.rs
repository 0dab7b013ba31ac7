//! What ranks that are threads allocate for each other counts for the one that frees it.

use std::sync::Barrier;

use candle_comm::{MIN_ADOPTED_BYTES, P2p, Pending, ProcessGroup, ReduceOp, adopted_bytes, launch};
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

/// What two ranks have adopted at the end, of which rank 0 starts `op` first; `end` is told whether rank 1 has started, and on
/// which rank it is.
fn adopted<T>(
    op: impl Fn(&ProcessGroup) -> Result<Pending<T>> + Sync,
    end: impl Fn(Pending<T>) -> Result<()> + Sync,
    is_early: bool,
) -> Result<Vec<i64>> {
    let (first, last) = (Barrier::new(2), Barrier::new(2));
    launch::threads(2, |world| {
        if world.rank() == 0 {
            let pending = op(&world)?;
            let pending = match is_early {
                true => {
                    end(pending)?;
                    None
                }
                false => Some(pending),
            };
            first.wait();
            last.wait();
            pending.map_or(Ok(()), &end)?;
        } else {
            first.wait();
            let pending = op(&world)?;
            last.wait();
            pending.wait()?;
        }
        Ok(adopted_bytes())
    })
}

#[test]
fn who_gives_up_a_result_frees_it_if_it_is_there_and_else_leaves_a_copy_of_the_input() -> Result<()>
{
    for bytes in SIZES {
        let xs = tensor(bytes)?;
        let op = |world: &ProcessGroup| world.start_all_reduce(&xs, ReduceOp::Sum);
        let (bytes, of_last) = match bytes {
            MIN_ADOPTED_BYTES => (bytes as i64, -1),
            _ => (bytes as i64, 1),
        };
        let end = |pending| {
            drop(pending);
            Ok(())
        };
        // A copy; the last rank frees it and has a result that it gets from itself or from a background job.
        assert_eq!(adopted(op, end, true)?, [-bytes, bytes]);
        assert_eq!(adopted(op, end, false)?, [bytes, of_last * bytes]);
        let in_place =
            |world: &ProcessGroup| world.start_all_reduce_in_place(&xs.copy()?, ReduceOp::Sum);
        assert_eq!(adopted(in_place, end, false)?, [0, 0]);
    }
    Ok(())
}

#[test]
fn a_result_that_never_comes_is_nobodys() -> Result<()> {
    for [waits, is_early] in [[true, false], [false, false], [false, true]] {
        let both = Barrier::new(2);
        let adopted = launch::threads(2, |world| {
            let xs = tensor(SIZES[0] * (1 + world.rank()))?;
            if is_early && world.rank() == 1 {
                both.wait();
            }
            let pending = world.start_all_reduce(&xs, ReduceOp::Sum)?;
            if !is_early {
                both.wait();
            }
            match waits {
                true => assert!(pending.wait().is_err()),
                false => drop(pending),
            }
            if is_early && world.rank() == 0 {
                both.wait();
            }
            Ok(adopted_bytes())
        })?;
        // The copy of an input that is left behind is freed by the rank that sees the error.
        let copy = if is_early { SIZES[0] as i64 } else { 0 };
        assert_eq!(adopted, [-copy, copy], "{waits} {is_early}");
    }
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

#[test]
fn a_message_that_nobody_wants_is_freed_by_who_is_last_to_have_it() -> Result<()> {
    let bytes = SIZES[0] as i64;
    let sizes = [[SIZES[0]; 2], [SIZES[0]; 2], [SIZES[0], SIZES[1]]];
    // Given up before it is sent, given up, and of another shape than was asked for.
    for ([sent, asked], (is_early, adopted_by)) in
        sizes.into_iter().zip([(true, 0), (false, 1), (false, 1)])
    {
        let order = Barrier::new(2);
        let adopted = launch::threads(2, |world| {
            let is_first = (world.rank() == 1) == is_early;
            if !is_first {
                order.wait();
            }
            if world.rank() == 0 {
                let xs = tensor(sent)?;
                world.batch_send_recv(&[P2p::Send { xs: &xs, dst: 1 }])?;
            } else {
                let (shape, dtype) = ((asked / 4).into(), DType::F32);
                let recv = P2p::Recv {
                    shape,
                    dtype,
                    src: 0,
                };
                let pending = world.start_batch_send_recv(&[recv])?;
                match sent == asked {
                    true => drop(pending),
                    false => assert!(pending.wait().is_err()),
                }
            }
            if is_first {
                order.wait();
            }
            Ok(adopted_bytes())
        })?;
        assert_eq!(adopted, [-bytes * adopted_by, bytes * adopted_by]);
    }
    Ok(())
}
