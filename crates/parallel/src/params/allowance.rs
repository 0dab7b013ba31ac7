//! What a checkpoint may hold beside the parameters of a model.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, bail};

use crate::files::Checkpoint;

/// Tensors of a checkpoint that the model does not ask for and that are no mistake.
#[derive(Clone, Default, Debug)]
pub(crate) struct Allowance {
    /// Second names of a parameter: (second name, name).
    pub aliases: BTreeMap<String, String>,
    /// Endings of the names of constants that some files carry along.
    pub suffixes: Vec<String>,
}

impl Allowance {
    /// An error if the checkpoint has tensors that are neither the model's nor allowed, or has other values for a second name.
    pub fn check_all_used(&self, checkpoint: &Checkpoint, used: &BTreeSet<&str>) -> Result<()> {
        for (alias, name) in &self.aliases {
            let tensors = checkpoint.tensors();
            if tensors.contains_key(alias)
                && tensors.contains_key(name)
                && checkpoint.bytes(alias)? != checkpoint.bytes(name)?
            {
                bail!(
                    "config.json ties {alias} to {name}, but the checkpoint in {} holds different values for them\nhint: set \
                 tie_word_embeddings to false to train both",
                    checkpoint.dir().display()
                );
            }
        }
        let is_allowed = |name: &str| {
            self.aliases.contains_key(name)
                || self.suffixes.iter().any(|suffix| name.ends_with(suffix))
        };
        let unused: Vec<&String> = checkpoint
            .tensors()
            .keys()
            .filter(|name| !used.contains(name.as_str()) && !is_allowed(name))
            .collect();
        if let Some(first) = unused.first() {
            bail!(
                "the checkpoint in {} holds {} tensors that the configured model does not use, the first is {first}\nhint: \
             config.json does not describe these weights (number of layers, biases, tied embeddings?)",
                checkpoint.dir().display(),
                unused.len()
            );
        }
        Ok(())
    }
}
