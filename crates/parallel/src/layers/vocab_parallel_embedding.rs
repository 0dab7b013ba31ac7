//! A token embedding whose vocabulary is divided over tensor-parallel ranks (arXiv:1909.08053, section 3).

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{Module, Result, Tensor, bail};
use candle_ops::{embedding_forward, embedding_grad_into, upload};

use super::layer::{GradientSink, Layer, in_graph};
use crate::params::{ParamBuilder, Shard, WEIGHT_INIT};

/// Holds the embeddings of a part of the vocabulary. The parts may differ by one row.
#[derive(Clone)]
pub struct VocabParallelEmbedding {
    weight: Tensor,
    shard: Shard,
    padding_idx: Option<u32>,
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
    let weight = vb.get_placed(
        (vocab_size, hidden_size),
        "weight",
        shard.clone(),
        WEIGHT_INIT,
    )?;
    Ok(VocabParallelEmbedding {
        weight,
        shard,
        padding_idx: None,
        tp: tp.clone(),
    })
}

impl VocabParallelEmbedding {
    /// The embedding without a gradient for the row of one token, as `torch.nn.Embedding` with a `padding_idx`.
    pub fn with_padding_idx(self, padding_idx: Option<u32>) -> Self {
        Self {
            padding_idx,
            ..self
        }
    }

    /// The local weight, (local_vocab, hidden).
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Rows of the local weight that are read, and those that get a gradient; u32::MAX for none here.
    fn local_ids(&self, tokens: &Tensor) -> Result<(Tensor, Tensor)> {
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
        let start = self.shard.range.start as u32;
        for id in &mut ids {
            let is_here = self.shard.range.contains(&(*id as usize));
            *id = if is_here { *id - start } else { u32::MAX };
        }
        let read = upload(ids.clone(), (b, t), self.weight.device())?;
        let padding = self.padding_idx.and_then(|id| id.checked_sub(start));
        if !padding.is_some_and(|row| ids.contains(&row)) {
            return Ok((read.clone(), read));
        }
        for id in ids.iter_mut().filter(|id| Some(**id) == padding) {
            *id = u32::MAX;
        }
        Ok((read, upload(ids, (b, t), self.weight.device())?))
    }
}

impl Layer for VocabParallelEmbedding {
    /// The rows of the local weight that get a gradient.
    type Saved = Tensor;

    /// (b, t) u32 -> (b, t, hidden), the same on all ranks. A token id beyond the vocabulary is an error. Tokens belong on the
    /// CPU, wherever the weight is: they are read there.
    fn forward_saving(&self, tokens: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let (read, with_grad) = self.local_ids(tokens)?;
        let part = embedding_forward(&self.weight, &read)?;
        Ok((self.tp.all_reduce(&part, ReduceOp::Sum)?, with_grad))
    }

    fn backward(
        &self,
        with_grad: Self::Saved,
        dy: &Tensor,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        gradients.write(&self.weight, &mut |dst, add| {
            embedding_grad_into(dst, add, &with_grad, dy)
        })?;
        Ok(None)
    }

    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.weight]
    }
}

impl Module for VocabParallelEmbedding {
    /// (b, t) u32 -> (b, t, hidden) in candle's graph, the same on all ranks. Tokens as for [`Layer::forward_saving`].
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        in_graph(self, tokens)
    }
}
