//! Updated weights on their way from the ranks that updated them (ZeRO) to all others, under the next forward pass.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_comm::{Pending, ProcessGroup};
use candle_core::{Result, Tensor, Var};

use crate::memory::MemoryGuard;
use crate::placement::{intersect, offset_by};

/// The gathers of an update, in the order in which a forward pass needs them.
///
/// All are under way from the update on: whether and when a rank waits for one concerns no other rank. Weights in f32 pass through
/// the buffers of whole gradients, which hold nothing then; others, and those of ZeRO-2, exist twice until they are waited for.
#[derive(Debug, Default)]
pub(crate) struct PendingWeights(Mutex<VecDeque<BucketGather>>);

/// One bucket's weights on their way from the data-parallel ranks.
type BucketGather = BucketWeights<Pending<Tensor>>;

/// What is gathered: one bucket's weights.
#[derive(Debug)]
pub(crate) struct BucketWeights<W = Tensor> {
    /// The first block that uses them.
    pub block: usize,
    /// A buffer for the whole bucket, whose values are not needed any more, of the weights' type.
    pub whole: W,
    /// The memory of that buffer if it exists for this alone.
    pub staging: Option<MemoryGuard>,
    /// This rank's slice of it, whose weights are up to date.
    pub own: Range<usize>,
    /// The weights, of one type, and their places in the bucket.
    pub weights: Vec<(Var, Range<usize>)>,
}

impl BucketWeights {
    /// Starts to gather what the ranks of `dp` have.
    fn start(self, dp: &ProcessGroup) -> Result<BucketGather> {
        for (var, range) in &self.weights {
            let mine = intersect(range, &self.own);
            if !mine.is_empty() {
                let values = flat_part(var, &offset_by(&mine, range.start))?;
                self.whole.slice_set(&values, 0, mine.start)?;
            }
        }
        Ok(BucketGather {
            block: self.block,
            whole: dp.start_all_gather_in_place(&self.whole)?,
            own: self.own,
            weights: self.weights,
            staging: self.staging,
        })
    }
}

impl BucketGather {
    fn finish(self) -> Result<()> {
        let whole = self.whole.wait()?;
        let len = whole.elem_count();
        for (var, range) in &self.weights {
            for other in [0..self.own.start, self.own.end..len] {
                let part = intersect(range, &other);
                if !part.is_empty() {
                    let place = flat_part(var, &offset_by(&part, range.start))?;
                    place.slice_set(&whole.narrow(0, part.start, part.len())?, 0, 0)?;
                }
            }
        }
        Ok(())
    }
}

/// A flat view of some values, given as row-major offsets.
fn flat_part(var: &Var, offsets: &Range<usize>) -> Result<Tensor> {
    let values = var.as_detached_tensor().flatten_all()?;
    values.narrow(0, offsets.start, offsets.len())
}

impl PendingWeights {
    /// Starts to gather a bucket's weights from the ranks of `dp`; buckets come in the order in which they are needed.
    pub fn gather(&self, bucket: BucketWeights, dp: &ProcessGroup) -> Result<()> {
        let started = bucket.start(dp)?;
        self.lock().push_back(started);
        Ok(())
    }

    /// Waits for the weights of block `block`, and those before it.
    pub fn wait_for_block(&self, block: usize) -> Result<()> {
        let mut queue = self.lock();
        while queue.front().is_some_and(|gather| gather.block <= block) {
            queue.pop_front().map_or(Ok(()), BucketGather::finish)?;
        }
        Ok(())
    }

    /// Waits for all of them.
    pub fn wait_for_all(&self) -> Result<()> {
        self.wait_for_all_but(0)
    }

    /// Waits until at most `num_left` gathers are under way.
    pub fn wait_for_all_but(&self, num_left: usize) -> Result<()> {
        let mut queue = self.lock();
        while queue.len() > num_left {
            queue.pop_front().map_or(Ok(()), BucketGather::finish)?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<BucketGather>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
