//! What the output of a block in plain candle was computed from, by candle's graph.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use candle_core::{Result, Storage, Tensor, TensorId, bail};

use crate::pass::{GradientSink, Pass};

/// Finds tensors that were computed from parameters before an update and are used after it: when the block was built, or in an earlier
/// pass. They have the values that the parameters had then, whatever training makes of these, though their gradients look right.
#[derive(Default)]
pub(super) struct KeptNodes(Mutex<Seen>);

#[derive(Default)]
enum Seen {
    /// No pass.
    #[default]
    Nothing,
    /// The computed tensors of the first pass, and how many updates came before it: none of them can occur in the graph of a pass after
    /// the next update unless it was kept.
    First(HashSet<TensorId>, usize),
    /// Two passes with an update between them.
    Enough,
}

impl KeptNodes {
    /// Looks at the output of the first pass, and at that of the first one after an update.
    ///
    /// # Errors
    /// A tensor that was kept and that does not share the values of what it was computed from, as views do.
    pub fn check(&self, output: &Tensor, pass: &Pass, names: &dyn GradientSink) -> Result<()> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Seen::Enough = *seen {
            return Ok(());
        }
        let num_updates = pass.step();
        if matches!(*seen, Seen::First(_, before) if before == num_updates) {
            return Ok(());
        }
        let nodes = output.sorted_nodes();
        let computed = || nodes.iter().filter(|node| !node.is_variable());
        *seen = match std::mem::take(&mut *seen) {
            Seen::Nothing => Seen::First(computed().map(|node| node.id()).collect(), num_updates),
            Seen::First(first, _) => {
                // From the parameters on, so that the first one found is the one that was made first.
                let kept = computed().rev().filter(|node| first.contains(&node.id()));
                kept.copied()
                    .try_for_each(|node| check_is_view(node, names))?;
                Seen::Enough
            }
            Seen::Enough => Seen::Enough,
        };
        Ok(())
    }
}

/// An error unless `kept` shares its values with a variable that it was computed from.
fn check_is_view(kept: &Tensor, names: &dyn GradientSink) -> Result<()> {
    let sources = kept.sorted_nodes();
    let variables = || sources.iter().filter(|node| node.is_variable());
    if variables().any(|variable| has_same_storage(kept, variable)) {
        return Ok(());
    }
    let mut names: Vec<String> = variables()
        .filter_map(|variable| names.name_of(variable))
        .collect();
    names.sort();
    bail!(
        "the block keeps a tensor of shape {:?} that was computed when the block was built, or in an earlier pass, from {}: it has the \
         values of that time, whatever training makes of them\nhint: compute it in the forward pass (cat, contiguous, \
         to_dtype and arithmetic make new values); only views (t, narrow, reshape of what is contiguous) may be kept",
        kept.shape(),
        names.join(", ")
    )
}

fn has_same_storage(a: &Tensor, b: &Tensor) -> bool {
    let ((a, _), (b, _)) = (a.storage_and_layout(), b.storage_and_layout());
    std::ptr::eq::<Storage>(&*a, &*b)
}
