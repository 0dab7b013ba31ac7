//! A token embedding whose vocabulary is divided over tensor-parallel ranks (arXiv:1909.08053, section 3).

use std::ops::Range;

use candle_core::{Error, Result, Tensor, bail};
use candle_ops::{embedding_forward, embedding_grad_into, upload};

use super::layer::Layer;
use crate::params::{ParamBuilder, TiledWeight, WEIGHT_INIT};
use crate::pass::{GradientSink, Pass, Region, Tape};
use crate::placement::Shard;

/// Holds the embeddings of a part of the vocabulary. The parts may differ by one row.
#[derive(Clone)]
pub struct VocabParallelEmbedding {
    weight: TiledWeight,
    shard: Shard,
    padding_idx: Option<u32>,
    region: Region,
}

/// An embedding of `vocab_size` tokens in `hidden_size` dimensions: (b, t) u32 -> (b, t, hidden).
///
/// # Errors
/// A vocabulary smaller than the number of ranks, and errors of [`ParamBuilder::get_placed`].
pub fn vocab_parallel_embedding(
    vocab_size: usize,
    hidden_size: usize,
    region: impl Into<Region>,
    vb: ParamBuilder,
) -> Result<VocabParallelEmbedding> {
    let region = region.into();
    let shard = Shard::even(0, vocab_size, region.tp())?;
    let weight = vb.get_tiled(
        (vocab_size, hidden_size),
        "weight",
        shard.clone(),
        WEIGHT_INIT,
    )?;
    Ok(VocabParallelEmbedding {
        weight,
        shard,
        padding_idx: None,
        region,
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

    /// The local weight, (local_vocab, hidden); its identity, but no values, where it comes [tile by tile](TiledWeight).
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// Rows of the local weight that are read; u32::MAX for none here.
    fn local_ids(&self, tokens: &Tensor) -> Result<Vec<u32>> {
        let (_b, t) = tokens.dims2()?;
        let mut ids = tokens.flatten_all()?.to_vec1::<u32>()?;
        let vocab_size = self.shard.global();
        if let Some(position) = ids.iter().position(|&id| id as usize >= vocab_size) {
            bail!(
                "token id {} (sequence {}, position {}) is beyond the vocabulary of {vocab_size} tokens\nhint: the \
                 tokenizer does not belong to this model",
                ids[position],
                position / t,
                position % t
            );
        }
        let start = self.shard.start() as u32;
        for id in &mut ids {
            let is_here = self.shard.held().contains(*id as usize);
            *id = if is_here { *id - start } else { u32::MAX };
        }
        Ok(ids)
    }

    /// The row of the local weight that gets no gradient, if it is among those that are read.
    fn padding_row(&self, read: &[u32]) -> Option<u32> {
        let row = self.padding_idx?.checked_sub(self.shard.start() as u32)?;
        read.contains(&row).then_some(row)
    }
}

/// The rows of a tile, counted from its first, of rows of the weight that are read; u32::MAX for none there.
fn within(rows: &Range<usize>, read: &[u32]) -> Vec<u32> {
    let within = |&row: &u32| match rows.contains(&(row as usize)) {
        true => row - rows.start as u32,
        false => u32::MAX,
    };
    read.iter().map(within).collect()
}

impl Layer for VocabParallelEmbedding {
    /// The rows of the local weight that get a gradient.
    type Saved = Tensor;

    /// (b, t) u32 -> (b, t, hidden), as the [`Region`] is left: without sequence parallelism the same on all ranks. A token id beyond the vocabulary is an error. Tokens belong on the
    /// CPU, wherever the weight is: they are read there.
    fn forward(&self, tokens: &Tensor, _pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        let read = self.local_ids(tokens)?;
        let upload = |ids: Vec<u32>| upload(ids, tokens.dims(), self.weight().device());
        let whole = upload(read.clone())?;
        let part = match self.weight.held_floats() {
            // Only what is read needs to be of the type that the model computes with.
            Some(held) => embedding_forward(held, &whole)?.to_dtype(self.weight.dtype())?,
            None => {
                let mut part: Option<Tensor> = None;
                self.weight.for_each_tile(|rows, tile| {
                    let of_tile = embedding_forward(tile, &upload(within(&rows, &read))?)?;
                    // Each row is in one tile, and zero from the others.
                    part = Some(match part.take() {
                        None => of_tile,
                        Some(part) => (part + of_tile)?,
                    });
                    Ok(())
                })?;
                part.ok_or_else(|| Error::msg("an embedding without rows"))?
            }
        };
        let with_grad = match self.padding_row(&read) {
            None => whole,
            Some(padding) => {
                let with_grad = |&row: &u32| if row == padding { u32::MAX } else { row };
                upload(read.iter().map(with_grad).collect())?
            }
        };
        Ok((self.region.leave(&part)?, with_grad))
    }

    fn backward(
        &self,
        with_grad: Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let dy = self.region.enter(dy, pass)?;
        let grad = move |dst: &Tensor, add| embedding_grad_into(dst, add, &with_grad, &dy);
        gradients.put(self.weight(), Box::new(grad))?;
        Ok(None)
    }

    fn weights(&self) -> Vec<&Tensor> {
        vec![self.weight()]
    }

    /// The tokens are those of the micro-batch.
    fn tape(&self) -> Option<Tape> {
        let (width, _) = self.weight.row_bytes();
        let row_of_weight = size_of::<u32>();
        Some(Tape {
            saved: row_of_weight,
            waiting: match self.weight().track_op() {
                true => row_of_weight + width,
                false => 0,
            },
            ..Tape::default()
        })
    }
}
