//! What a trainer takes its micro-batches from.

use candle_core::{Result, bail};
use candle_parallel::Pass;
use serde::{Deserialize, Serialize};

use super::batches::Batches;

/// Micro-batches of steps that come one after the other: [`Batches`] of samples, or any iterator of them.
pub trait TrainingData {
    /// This rank's micro-batches of `step`, counted from 0; `None` if there are no more.
    ///
    /// # Errors
    /// Data that cannot be read.
    fn batch(&mut self, step: usize) -> Result<Option<Vec<Pass>>>;

    /// Leaves out what the first `num_steps` steps had, before the first [`Self::batch`]: a run goes on after them.
    ///
    /// # Errors
    /// Data that cannot be read.
    fn skip_steps(&mut self, num_steps: usize) -> Result<()>;

    /// The place of `step` in the data, which a checkpoint remembers: also of the step after the last.
    ///
    /// # Errors
    /// A step beyond that.
    fn position(&self, step: usize) -> Result<DataPosition>;

    /// Whether [`Self::position`] counts samples, as the workers of a parameter server need it, and not steps.
    fn counts_samples(&self) -> bool {
        false
    }

    /// What the metrics tell of `step`; `None` where there are no epochs.
    ///
    /// # Errors
    /// A step out of range.
    fn filling(&self, _step: usize) -> Result<Option<Filling>> {
        Ok(None)
    }

    /// Passes over the data before `step`, with their fraction; `None` where there are no epochs.
    ///
    /// # Errors
    /// A step out of range.
    fn epoch(&self, _step: usize) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// A place in the endless order of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DataPosition {
    /// Times that all samples have been taken.
    pub epoch: usize,
    /// Samples of this epoch that have been taken.
    pub sample: usize,
    /// Both in one number: all samples that have been taken.
    pub total: usize,
}

impl DataPosition {
    /// The place of the first sequence of `step`.
    ///
    /// # Errors
    /// As [`Batches::position`].
    pub fn of(batches: &Batches, step: usize) -> Result<Self> {
        let total = batches.position(step)?;
        Ok(Self {
            epoch: total / batches.num_samples(),
            sample: total % batches.num_samples(),
            total,
        })
    }

    /// The place of `step` in data that is known by its steps alone.
    pub fn of_step(step: usize) -> Self {
        Self {
            epoch: 0,
            sample: step,
            total: step,
        }
    }
}

/// Positions of a step over all data-parallel ranks, and the tokens of the data at them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Filling {
    /// Positions that hold a token of the data.
    pub num_tokens: usize,
    /// All positions of the micro-batches.
    pub num_positions: usize,
}

impl Filling {
    /// `num_tokens` of the data at `num_positions` positions.
    pub fn new(num_tokens: usize, num_positions: usize) -> Self {
        Self {
            num_tokens,
            num_positions,
        }
    }

    /// The fraction of positions that hold no token of the data.
    pub fn padding(&self) -> f64 {
        1.0 - self.num_tokens as f64 / self.num_positions.max(1) as f64
    }
}

impl TrainingData for &Batches {
    fn batch(&mut self, step: usize) -> Result<Option<Vec<Pass>>> {
        Batches::batch(self, step).map(Some)
    }

    /// A batch is a function of its step.
    fn skip_steps(&mut self, _num_steps: usize) -> Result<()> {
        Ok(())
    }

    fn position(&self, step: usize) -> Result<DataPosition> {
        DataPosition::of(self, step)
    }

    fn counts_samples(&self) -> bool {
        true
    }

    fn filling(&self, step: usize) -> Result<Option<Filling>> {
        Batches::filling(self, step).map(Some)
    }

    fn epoch(&self, step: usize) -> Result<Option<f64>> {
        Batches::epoch(self, step).map(Some)
    }
}

/// Each item has the micro-batches of a step. A run that goes on leaves out as many items as it has made steps.
impl<I: Iterator<Item = Result<Vec<Pass>>>> TrainingData for I {
    fn batch(&mut self, _step: usize) -> Result<Option<Vec<Pass>>> {
        self.next().transpose()
    }

    fn skip_steps(&mut self, num_steps: usize) -> Result<()> {
        for step in 0..num_steps {
            if self.next().transpose()?.is_none() {
                bail!("the data ends after {step} of the {num_steps} steps that the run has made");
            }
        }
        Ok(())
    }

    fn position(&self, step: usize) -> Result<DataPosition> {
        Ok(DataPosition::of_step(step))
    }
}
