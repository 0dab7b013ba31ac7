//! The unit of work that travels through a pipeline: a few sequences of one length.

use candle_core::{Result, Tensor, bail};
use candle_ops::DocumentStarts;

use super::key_value_cache::KeyValueCache;

/// A micro-batch: `b` sequences of `t` tokens.
///
/// Every rank of a pipeline holds the same micro-batches, so that each stage knows the shapes it will receive and the
/// last one has the targets.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Token ids, (b, t) u32. They and the targets belong on the CPU, where they are checked and counted.
    pub tokens: Tensor,
    /// Target ids, (b, t) u32; [`candle_ops::IGNORE_INDEX`] marks a position without a target. `None`: the model returns
    /// logits instead of a loss.
    pub targets: Option<Tensor>,
    /// The documents that the sequences are made of, if they have several: packed records, padding.
    pub documents: Option<DocumentStarts>,
    /// While a text is generated, what comes before these tokens: [`super::Stage::infer`] alone reads it, and adds to it.
    pub past: Option<KeyValueCache>,
}

impl MicroBatch {
    /// Number of sequences and tokens per sequence, (b, t).
    pub fn dims(&self) -> Result<(usize, usize)> {
        self.tokens.dims2()
    }

    /// Number of targets that are not [`candle_ops::IGNORE_INDEX`].
    pub fn num_targets(&self) -> Result<usize> {
        let Some(targets) = &self.targets else {
            bail!("this micro-batch has no targets to count; expected one u32 target per token");
        };
        let ids = targets.flatten_all()?.to_vec1::<u32>()?;
        Ok(ids
            .into_iter()
            .filter(|&id| id != candle_ops::IGNORE_INDEX)
            .count())
    }
}
