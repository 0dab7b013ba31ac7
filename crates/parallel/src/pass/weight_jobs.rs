//! The weight half of a backward pass that was put off.

use candle_core::{Result, Tensor};

use super::gradient_sink::{GradientSink, WeightGrad, WeightHalf};

/// Keeps the gradients that a block's backward pass puts, so that this is its input half alone; [`Self::run`] is the weight half.
pub(crate) struct WeightJobs {
    jobs: Vec<(Tensor, WeightGrad)>,
    weights_stay: bool,
}

impl WeightJobs {
    /// None yet; `weights_stay` until they are run.
    pub fn new(weights_stay: bool) -> Self {
        Self {
            jobs: Vec::new(),
            weights_stay,
        }
    }

    /// Computes them in the order in which they were put.
    ///
    /// # Errors
    /// What the jobs and `sink` return.
    pub fn run(self, sink: &mut dyn GradientSink) -> Result<()> {
        let mut jobs = self.jobs.into_iter();
        jobs.try_for_each(|(weight, grad)| sink.put(&weight, grad))
    }
}

/// The gradients of an input half: most of them wait, the large ones are computed at once.
pub(crate) struct ButLarge<'a> {
    pub waiting: &'a mut WeightJobs,
    pub now: &'a mut dyn GradientSink,
}

impl GradientSink for ButLarge<'_> {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.waiting.put(weight, grad)
    }

    fn put_large(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.now.put(weight, grad)
    }

    fn weight_half(&self) -> WeightHalf {
        self.waiting.weight_half()
    }

    fn name_of(&self, weight: &Tensor) -> Option<String> {
        self.now.name_of(weight)
    }
}

impl GradientSink for WeightJobs {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        if weight.track_op() {
            self.jobs.push((weight.clone(), grad));
        }
        Ok(())
    }

    fn weight_half(&self) -> WeightHalf {
        match self.weights_stay {
            true => WeightHalf::Later,
            false => WeightHalf::LaterWithoutWeights,
        }
    }
}
