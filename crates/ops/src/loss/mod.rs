//! Cross-entropy, of whole rows of logits and of a part of the vocabulary.

pub(crate) mod cross_entropy;
pub(crate) mod vocab_shard;
#[cfg(feature = "cuda")]
pub(crate) mod vocab_shard_gpu;
