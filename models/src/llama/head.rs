//! The last block: final norm, projection to the vocabulary, loss.

use candle_comm::ProcessGroup;
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Init;
use candle_ops::rms_norm;
use candle_parallel::regions::gather_parts;
use candle_parallel::{
    Block, ColumnParallelLinear, MicroBatch, ParamBuilder, Shard, WEIGHT_INIT,
    vocab_parallel_cross_entropy,
};

use super::config::LlamaConfig;

/// Final norm and language-model head; a [`Block`] from (b, t, hidden) to the sum of the losses or the logits.
pub struct Head {
    norm: Tensor,
    lm_head: ColumnParallelLinear,
    shard: Shard,
    eps: f64,
    tp: ProcessGroup,
}

impl Head {
    pub(super) fn new(config: &LlamaConfig, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Self> {
        let shard = Shard::even(0, config.vocab_size, tp)?;
        let weight = match config.tie_word_embeddings {
            true => vb.pp("model.embed_tokens"),
            false => vb.pp("lm_head"),
        };
        let shape = (config.vocab_size, config.hidden_size);
        let weight = weight.get_shard(shape, "weight", shard.clone(), WEIGHT_INIT)?;
        Ok(Self {
            norm: vb
                .pp("model.norm")
                .get(config.hidden_size, "weight", Init::Const(1.0))?,
            lm_head: ColumnParallelLinear::new(weight, None, tp.clone()),
            shard,
            eps: config.rms_norm_eps,
            tp: tp.clone(),
        })
    }
}

impl Block for Head {
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        let (b, t, _hidden) = xs.dims3()?;
        let normed = rms_norm(xs, &self.norm, self.eps)?;
        let logits = self.lm_head.forward(&normed)?; // (b, t, local_vocab)
        match &batch.targets {
            None => gather_parts(&logits, self.shard.global, &self.tp),
            Some(targets) => {
                let logits = logits.reshape((b * t, self.shard.len()))?;
                let targets = targets.flatten_all()?;
                let losses =
                    vocab_parallel_cross_entropy(&logits, &targets, &self.shard, &self.tp)?;
                losses.to_dtype(DType::F64)?.sum_all()
            }
        }
    }
}
