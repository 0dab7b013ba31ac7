//! A token embedding whose vocabulary is divided over tensor-parallel ranks (arXiv:1909.08053, section 3).

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor, bail};
use candle_ops::embedding;

use crate::param_builder::{ParamBuilder, WEIGHT_INIT};
use crate::regions::reduce_from_tensor_parallel_region;
use crate::shard::Shard;

/// Holds the embeddings of a part of the vocabulary. The parts may differ by one row.
#[derive(Clone)]
pub struct VocabParallelEmbedding {
    weight: Tensor,
    shard: Shard,
    tp: ProcessGroup,
}

/// An embedding of `vocab_size` tokens in `hidden_size` dimensions: (b, t) u32 -> (b, t, hidden).
pub fn vocab_parallel_embedding(
    vocab_size: usize,
    hidden_size: usize,
    tp: &ProcessGroup,
    vb: ParamBuilder,
) -> Result<VocabParallelEmbedding> {
    let shard = Shard::even(0, vocab_size, tp)?;
    let weight = vb.get_shard(
        (vocab_size, hidden_size),
        "weight",
        shard.clone(),
        WEIGHT_INIT,
    )?;
    Ok(VocabParallelEmbedding {
        weight,
        shard,
        tp: tp.clone(),
    })
}

impl VocabParallelEmbedding {
    /// The local weight, (local_vocab, hidden).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// (b, t) u32 -> (b, t, hidden), the same on all ranks. A token id beyond the vocabulary is an error.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (b, t) = tokens.dims2()?;
        let mut ids = tokens.flatten_all()?.to_vec1::<u32>()?;
        let vocab_size = self.shard.global;
        if let Some(position) = ids.iter().position(|&id| id as usize >= vocab_size) {
            bail!(
                "token id {} (sequence {}, position {}) is beyond the vocabulary of {vocab_size} tokens\nhint: the \
                 tokenizer does not belong to this model",
                ids[position],
                position / t,
                position % t
            );
        }
        for id in &mut ids {
            let is_here = self.shard.range.contains(&(*id as usize));
            *id = if is_here {
                *id - self.shard.range.start as u32
            } else {
                u32::MAX
            };
        }
        let local_ids = Tensor::from_vec(ids, (b, t), tokens.device())?;
        reduce_from_tensor_parallel_region(&embedding(&self.weight, &local_ids)?, &self.tp)
    }
}
