//! A rank's lists in words.

use std::fmt::Write as _;

use candle_core::Result;

use super::{PlannedStep, PlannedWork};
use crate::params::RankSpec;
use crate::program::Lowering;

impl PlannedWork<'_> {
    /// The step of a rank with `spec` in words: the buckets of its parameters, then a line for each pass and for the actions between passes.
    ///
    /// # Errors
    /// As for [`MemoryPlan::new`](crate::MemoryPlan::new).
    pub fn program(&self, spec: &RankSpec) -> Result<String> {
        let step = PlannedStep::new(spec, self)?;
        let mut text = String::new();
        for (index, bucket) in spec.layout.all().enumerate() {
            let block = bucket.block;
            let names = bucket
                .slots
                .iter()
                .map(|slot| spec.params[slot.param].name.as_str());
            let names: Vec<&str> = names.collect();
            let _ = writeln!(
                text,
                "bucket {index}: {} values of block {block}, {}",
                bucket.len,
                names.join(", ")
            );
        }
        text.push_str("the number of a pass is a block, that of Update a part of the optimizer's state, others are buckets\n");
        let mut lowering = Lowering::new(step.setup());
        for list in step.lower(&mut lowering)? {
            for (instruction, actions) in list.phases() {
                let cell = instruction.map_or("--".to_string(), |instruction| instruction.cell());
                let actions = actions.iter().map(|action| format!("{action:?}"));
                let actions: Vec<String> = actions.collect();
                if instruction.is_some() || !actions.is_empty() {
                    let _ = writeln!(text, "{cell:<6}{}", actions.join("; "));
                }
            }
        }
        Ok(text)
    }
}
