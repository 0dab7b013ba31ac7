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

/// Which gradients of weights are computed with the input half, as to wait would keep more than it is worth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Early {
    /// Those that are computed already.
    pub finished: bool,
    /// Those that keep more than the forward pass has kept.
    pub large: bool,
}

/// The gradients of an input half: most of them wait.
pub(crate) struct InputHalf<'a> {
    pub waiting: &'a mut WeightJobs,
    pub now: &'a mut dyn GradientSink,
    pub early: Early,
    /// None of them waits.
    pub none_waits: bool,
}

impl InputHalf<'_> {
    fn sink(&mut self, is_early: bool) -> &mut dyn GradientSink {
        if is_early || self.none_waits {
            self.now
        } else {
            self.waiting
        }
    }
}

impl GradientSink for InputHalf<'_> {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.sink(false).put(weight, grad)
    }

    fn put_large(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.sink(self.early.large).put(weight, grad)
    }

    fn put_grad(&mut self, weight: &Tensor, grad: Tensor) -> Result<()> {
        self.sink(self.early.finished).put_grad(weight, grad)
    }

    fn weight_half(&self) -> WeightHalf {
        match self.none_waits {
            true => WeightHalf::AtOnce,
            false => self.waiting.weight_half(),
        }
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
