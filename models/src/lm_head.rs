//! The last block: final norm, projection to the vocabulary, loss.

use candle_core::{Result, Tensor};
use candle_parallel::{
    GradientSink, Head, Loss, ParamBuilder, Pass, Region, Tape, VocabParallelHead,
    vocab_parallel_head,
};

use crate::config::ModelConfig;
use crate::norm::Norm;

/// Final norm and language-model head; a [`Head`] from (b, t, hidden) to the loss or the logits.
pub struct LmHead {
    norm: Norm,
    vocab: VocabParallelHead,
}

impl LmHead {
    pub(crate) fn new(config: &ModelConfig, region: &Region, vb: ParamBuilder) -> Result<Self> {
        let weight = match config.tie_word_embeddings {
            true => vb.tied().pp("model.embed_tokens"),
            false => vb.pp("lm_head"),
        };
        let (width, vb) = (config.hidden_size, vb.pp("model.norm"));
        Ok(Self {
            vocab: vocab_parallel_head(config.vocab_size, width, region, weight)?,
            norm: Norm::new(width, config, region.outside(), vb)?,
        })
    }
}

impl Head for LmHead {
    fn loss(
        &self,
        xs: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Loss, Option<Tensor>)> {
        let (loss, dnormed) = self.vocab.loss(&self.norm.forward(xs)?, pass, gradients)?;
        let dx = dnormed.map(|dy| self.norm.backward(xs, &dy, None, gradients));
        Ok((loss, dx.transpose()?))
    }

    fn evaluate(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        self.vocab.evaluate(&self.norm.forward(xs)?, pass)
    }

    fn logits(&self, xs: &Tensor, rows: &[usize], pass: &Pass) -> Result<Tensor> {
        self.vocab.logits(&self.norm.forward(xs)?, rows, pass)
    }

    fn tape(&self) -> Option<Tape> {
        self.vocab.tape()
    }
}
