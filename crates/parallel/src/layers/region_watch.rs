//! Finds, in the first steps, tensor-parallel regions that are entered with what the ranks do not have alike, and left
//! with what each of them has whole.
//!
//! The functions of [`regions`](super::regions) know neither step nor block: what they see is noted for the thread,
//! whose pass of a block asks for it.

use std::cell::RefCell;

use candle_comm::{ProcessGroup, Scope};
use candle_core::{Result, Tensor, bail};

use crate::checksums::checksum;

thread_local! {
    /// What entered regions in the pass of a block that is watched.
    static ENTERED: RefCell<Option<Vec<u64>>> = const { RefCell::new(None) };
}

/// Does `work`, a pass of a block. What entered regions in it, condensed, if it is watched.
pub(crate) fn watched<T>(is_watched: bool, work: impl FnOnce() -> T) -> (T, Vec<u64>) {
    ENTERED.set(is_watched.then(Vec::new));
    let result = work();
    (result, ENTERED.take().unwrap_or_default())
}

/// Whether regions of `tp` are watched now: those of the mesh's tensor-parallel ranks.
fn is_watched(tp: &ProcessGroup) -> bool {
    Scope::covers(tp) && ENTERED.with_borrow(Option::is_some)
}

/// Notes what enters a region.
pub(crate) fn note_entered(xs: &Tensor, tp: &ProcessGroup) -> Result<()> {
    if !is_watched(tp) {
        return Ok(());
    }
    let sum = checksum(xs)?;
    ENTERED.with_borrow_mut(|entered| entered.iter_mut().for_each(|entered| entered.push(sum)));
    Ok(())
}

/// An error if `mine` is not this rank's summand of `sum` but all of it, as on the other ranks: `what` it is goes into
/// the message.
pub(super) fn check_is_summand(
    what: &str,
    mine: &Tensor,
    sum: &Tensor,
    tp: &ProcessGroup,
) -> Result<()> {
    let num_ranks = tp.world_size();
    if !is_watched(tp) || !is_each_the_whole(mine, sum, num_ranks)? {
        return Ok(());
    }
    bail!(
        "{what} is the same on all {num_ranks} tensor-parallel ranks, though it should be a summand on each: the sum is {num_ranks} times too \
         large\nhint: a region is entered once (copy_to_tensor_parallel_region, ColumnParallelLinear), and left once \
         (reduce_from_tensor_parallel_region, RowParallelLinear), whose result all ranks have"
    )
}

/// Whether `sum`, to which `num_ranks` ranks have added, is as many times `mine`, up to the rounding of the additions;
/// not if it is zeros.
pub(crate) fn is_each_the_whole(mine: &Tensor, sum: &Tensor, num_ranks: usize) -> Result<bool> {
    let values = |values: &Tensor| {
        let values = values.flatten_all()?.to_dtype(candle_core::DType::F32)?;
        values.to_vec1::<f32>()
    };
    let (mine, sum) = (values(mine)?, values(sum)?);
    let factor = num_ranks as f32;
    let is_multiple = |(mine, sum): (&f32, &f32)| {
        (sum - factor * mine).abs() <= factor * f32::EPSILON * (factor * mine).abs()
    };
    let has_values = mine.iter().chain(&sum).any(|value| *value != 0.0);
    Ok(has_values && mine.iter().zip(&sum).all(is_multiple))
}
