//! The last block: final norm, projection to the vocabulary, loss.

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor, bail};
use candle_parallel::regions::gather_parts;
use candle_parallel::{
    Backward, Block, ColumnParallelLinear, Gradient, GradientSink, Layer, MicroBatch, ParamBuilder,
    Pass, Shard, WEIGHT_INIT, linear_cross_entropy, linear_predictions,
};

use crate::config::ModelConfig;
use crate::norm::Norm;

/// Final norm and language-model head; a [`Block`] from (b, t, hidden) to the sum of the losses (and, without a backward pass, the number of
/// right predictions) or the logits.
#[derive(Clone)]
pub struct Head {
    norm: Norm,
    lm_head: ColumnParallelLinear,
    shard: Shard,
    tp: ProcessGroup,
}

impl Head {
    pub(crate) fn new(config: &ModelConfig, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Self> {
        let shard = Shard::even(0, config.vocab_size, tp)?;
        let weight = match config.tie_word_embeddings {
            true => vb.tied().pp("model.embed_tokens"),
            false => vb.pp("lm_head"),
        };
        let shape = (config.vocab_size, config.hidden_size);
        let weight = weight.get_tiled(shape, "weight", shard.clone(), WEIGHT_INIT)?;
        let (width, vb) = (config.hidden_size, vb.pp("model.norm"));
        let norm = Norm::new(width, config, Gradient::Complete, vb)?;
        Ok(Self {
            norm,
            lm_head: ColumnParallelLinear::new(weight, None, tp.clone()),
            shard,
            tp: tp.clone(),
        })
    }
}

impl Block for Head {
    fn forward(&self, xs: &Tensor, pass: &mut Pass<'_>) -> Result<(Tensor, Backward)> {
        let Some(targets) = &pass.batch.targets else {
            bail!("a micro-batch without targets has no loss to train on");
        };
        let normed = self.norm.forward(xs)?;
        let (loss, dnormed) = linear_cross_entropy(
            &normed.flatten_to(1)?,
            self.lm_head.tiled_weight(),
            &targets.flatten_all()?,
            &self.shard,
            &self.tp,
            pass.loss_scale,
            pass.gradients,
        )?;
        let dnormed = dnormed.reshape(xs.dims())?;
        let (norm, xs) = (self.norm.clone(), xs.clone());
        let backward = move |gradients: &mut dyn GradientSink| {
            norm.backward(&xs, &dnormed, None, gradients).map(Some)
        };
        Ok((loss, Backward::Loss(Box::new(backward))))
    }

    fn infer(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        let normed = self.norm.forward(xs)?;
        let Some(targets) = &batch.targets else {
            let (logits, _) = self.lm_head.forward_saving(&normed)?; // (b, t, local_vocab)
            return gather_parts(&logits, self.shard.global, &self.tp);
        };
        linear_predictions(
            &normed.flatten_to(1)?,
            self.lm_head.tiled_weight(),
            &targets.flatten_all()?,
            &self.shard,
            &self.tp,
        )
    }
}
