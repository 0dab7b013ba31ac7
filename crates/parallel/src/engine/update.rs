//! The update of the weights.

use candle_core::{Result, bail};

use super::executor::{Executor, Update};
use crate::gradients::ReducedGradients;
use crate::optimizer::DistributedOptimizer;
use crate::program::{Lowering, Setup};

impl DistributedOptimizer {
    /// Updates the parameters from reduced gradients, and fetches what other replicas updated. With
    /// [`DataParallel::overlap`](crate::DataParallel::overlap) that goes on after the return: see there who waits for it.
    ///
    /// # Errors
    /// A learning rate that is negative or not finite, before anything is updated. Failures of ranks and memory that is missing, after
    /// which some parameters are updated and others are not: the run cannot go on.
    pub fn apply(&mut self, reduced: ReducedGradients, lr: f64) -> Result<()> {
        if !(lr >= 0.0 && lr.is_finite()) {
            bail!(
                "the learning rate is {lr}; expected a finite number >= 0; the weights were not updated"
            );
        }
        self.begin_update()?;
        let params = self.params.clone();
        let setup = Setup {
            state_parts: self.store.num_parts(),
            state_is_away: self.store.column.is_away(),
            ..Setup::of_rank(&params, reduced.away().is_some())
        };
        let program = Lowering::new(setup).update()?;
        let mut executor = Executor {
            update: Some(Update {
                optimizer: self,
                gradients: &reduced,
                number: self.num_steps() + 1,
                lr,
            }),
            ..Executor::new(&params)
        };
        executor.run(&program)?;
        self.end_update();
        Ok(())
    }
}
