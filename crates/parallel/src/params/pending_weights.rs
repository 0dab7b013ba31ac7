//! Updated weights on their way from the ranks that updated them (ZeRO) to all others, under the next forward pass.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_comm::{Pending, ProcessGroup};
use candle_core::{Result, Tensor, Var};

use super::placement::{intersect, offset_by};

/// Gathers that move at the same time: more would only need more memory, as a bucket's worth of weights exists twice
/// meanwhile.
const MAX_STARTED: usize = 2;

/// The gathers of an update, in the order in which a forward pass needs them.
#[derive(Debug, Default)]
pub(crate) struct PendingWeights(Mutex<VecDeque<Gather>>);

/// One bucket's weights, gathered over the data-parallel ranks.
#[derive(Debug)]
pub(crate) struct Gather {
    /// The first block that uses them.
    pub block: usize,
    /// Number of values of the bucket.
    pub len: usize,
    /// This rank's slice of it, whose weights are up to date.
    pub own: Range<usize>,
    /// The weights, of one type, and their places in the bucket.
    pub weights: Vec<(Var, Range<usize>)>,
    /// The data-parallel ranks.
    pub dp: ProcessGroup,
    /// The bucket's weights, once they are under way.
    pub started: Option<Pending<Tensor>>,
}

impl Gather {
    fn start(&mut self) -> Result<()> {
        let (Some((first, _)), None) = (self.weights.first(), &self.started) else {
            return Ok(());
        };
        let whole = Tensor::zeros(self.len, first.dtype(), first.device())?;
        for (var, range) in &self.weights {
            let mine = intersect(range, &self.own);
            if !mine.is_empty() {
                let values = flat_part(var, &offset_by(&mine, range.start))?;
                whole.slice_set(&values, 0, mine.start)?;
            }
        }
        self.started = Some(self.dp.start_all_gather_in_place(&whole)?);
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        self.start()?;
        let Some(started) = self.started else {
            return Ok(());
        };
        let whole = started.wait()?;
        for (var, range) in &self.weights {
            for other in [0..self.own.start, self.own.end..self.len] {
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
    /// Adds the gathers of an update, in the order in which they are needed, and starts the first.
    pub fn add(&self, gathers: impl IntoIterator<Item = Gather>) -> Result<()> {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.extend(gathers);
        start_some(&mut queue)
    }

    /// Waits for the weights of block `block`, and those before it.
    pub fn wait_for_block(&self, block: usize) -> Result<()> {
        self.wait_while(|gather| gather.block <= block)
    }

    /// Waits for all of them.
    pub fn wait_for_all(&self) -> Result<()> {
        self.wait_while(|_| true)
    }

    fn wait_while(&self, is_needed: impl Fn(&Gather) -> bool) -> Result<()> {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while queue.front().is_some_and(&is_needed) {
            let Some(first) = queue.pop_front() else {
                break;
            };
            // The next ones move while this one's weights are written.
            start_some(&mut queue)?;
            first.finish()?;
        }
        Ok(())
    }
}

fn start_some(queue: &mut VecDeque<Gather>) -> Result<()> {
    queue
        .iter_mut()
        .take(MAX_STARTED)
        .try_for_each(Gather::start)
}
