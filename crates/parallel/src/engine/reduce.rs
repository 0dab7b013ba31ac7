//! The sums of a step over all ranks.

use candle_core::{Error, Result};

use super::executor::Executor;
use crate::gradients::{Gradients, ReducedGradients, UpdateNotice};
use crate::program::{Lowering, Setup};

impl Gradients {
    /// Sums the gradients of a step over all ranks, and computes their norm and the loss.
    ///
    /// The result is the gradient of the mean of the losses over all targets of the global batch: this is the one place where the sum of
    /// losses is divided. Norm, loss and number of targets come to the host in one read, for which it waits for a GPU; if tensor-parallel
    /// ranks hold copies of parameters, the gradients of these are read before, to compare them. The gradients are cleared, also by an
    /// error; what is returned may share their buffers and must be used before the next backward pass.
    ///
    /// # Errors
    /// A trainable parameter without a gradient, copies of a parameter whose gradients differ, in the first steps also blocks whose
    /// outputs or gradients differ over tensor-parallel ranks, a global batch without targets, and failures of ranks.
    pub fn reduce(&mut self) -> Result<ReducedGradients> {
        self.reduce_for(None)
    }

    /// [`Self::reduce`], for an update about which all ranks must say the same.
    pub(crate) fn reduce_for(&mut self, update: Option<&UpdateNotice>) -> Result<ReducedGradients> {
        let reduced = self.reduce_all(update);
        self.clear();
        reduced
    }

    fn reduce_all(&mut self, notice: Option<&UpdateNotice>) -> Result<ReducedGradients> {
        self.check_all_complete()?;
        let params = self.params.clone();
        let setup = Setup::of_rank(&params, self.column().is_away());
        let program = Lowering::new(setup).with_sums(self.places()).reduce()?;
        let mut executor = Executor {
            gradients: Some(self),
            notice,
            ..Executor::new(&params)
        };
        executor.run(&program)?;
        let missing = || Error::msg("the list of the sums of a step has no norm");
        executor.reduced.ok_or_else(missing)
    }
}
