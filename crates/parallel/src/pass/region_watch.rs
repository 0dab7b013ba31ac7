//! Finds, in the first steps, tensor-parallel regions that are entered with what the ranks do not have alike, and left
//! with what each of them has whole.
//!
//! The functions of [`regions`](crate::regions) know neither step nor block: what they see is noted for the thread,
//! whose pass of a block asks for it.

use std::cell::RefCell;
use std::collections::HashSet;

use candle_comm::{ProcessGroup, Scope};
use candle_core::{DType, Result, Tensor};

use crate::checksums::checksum;

thread_local! {
    /// The regions in the pass of a block that is watched.
    static SEEN: RefCell<Option<SeenRegions>> = const { RefCell::new(None) };
}

/// Inputs and sums of regions, as a pass of a block saw them.
#[derive(Default)]
pub(crate) struct SeenRegions {
    /// Checksums of the inputs of regions.
    pub entered: Vec<u64>,
    /// Sums that left regions, in the order of the calls.
    pub sums: Vec<RegionSum>,
}

/// A sum over the ranks of a region.
pub(crate) struct RegionSum {
    /// The summand, in words.
    pub what: &'static str,
    /// Whether each rank had the whole of it, and not a summand; `None` if the values say nothing of that.
    pub is_each_the_whole: Option<bool>,
}

/// Does `work`, a pass of a block. What was seen of regions in it, if it is watched.
pub(crate) fn watched<T>(is_watched: bool, work: impl FnOnce() -> T) -> (T, SeenRegions) {
    SEEN.set(is_watched.then(SeenRegions::default));
    let result = work();
    (result, SEEN.take().unwrap_or_default())
}

/// Whether regions of `tp` are watched now: those of the mesh's tensor-parallel ranks.
fn is_watched(tp: &ProcessGroup) -> bool {
    Scope::covers(tp) && SEEN.with_borrow(Option::is_some)
}

/// Notes what enters a region.
pub(crate) fn note_entered(xs: &Tensor, tp: &ProcessGroup) -> Result<()> {
    if !is_watched(tp) {
        return Ok(());
    }
    let sum = checksum(xs)?;
    SEEN.with_borrow_mut(|seen| seen.iter_mut().for_each(|seen| seen.entered.push(sum)));
    Ok(())
}

/// Notes whether `mine` is all of `sum`, and not this rank's summand. Equal counts, constants and what a router
/// without training gives may rightly be the same on all ranks, so few different values say nothing.
pub(crate) fn note_sum(
    what: &'static str,
    mine: &Tensor,
    sum: &Tensor,
    tp: &ProcessGroup,
) -> Result<()> {
    if !is_watched(tp) {
        return Ok(());
    }
    let has_many = has_many_values(mine)?;
    let is_each_the_whole = has_many.then(|| is_each_the_whole(mine, sum, tp.world_size()));
    let is_each_the_whole = is_each_the_whole.transpose()?;
    SEEN.with_borrow_mut(|seen| {
        seen.iter_mut().for_each(|seen| {
            seen.sums.push(RegionSum {
                what,
                is_each_the_whole,
            });
        });
    });
    Ok(())
}

/// As many different values are no accident if all ranks have them.
const MANY_VALUES: usize = 64;

fn numbers(values: &Tensor) -> Result<Vec<f32>> {
    let values = values.flatten_all()?.to_dtype(DType::F32)?;
    values.to_vec1()
}

fn has_many_values(values: &Tensor) -> Result<bool> {
    let mut different = HashSet::new();
    let mut values = numbers(values)?.into_iter();
    Ok(values.any(|value| different.insert(value.to_bits()) && different.len() >= MANY_VALUES))
}

/// Whether `sum`, to which `num_ranks` ranks have added, is as many times `mine`, up to the rounding of the additions;
/// not if it is zeros.
pub(crate) fn is_each_the_whole(mine: &Tensor, sum: &Tensor, num_ranks: usize) -> Result<bool> {
    let (mine, sum) = (numbers(mine)?, numbers(sum)?);
    let factor = num_ranks as f32;
    let is_multiple = |(mine, sum): (&f32, &f32)| {
        (sum - factor * mine).abs() <= factor * f32::EPSILON * (factor * mine).abs()
    };
    let has_values = mine.iter().chain(&sum).any(|value| *value != 0.0);
    Ok(has_values && mine.iter().zip(&sum).all(is_multiple))
}
