//! One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

use std::sync::Arc;

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor};
use candle_parallel::{Backward, Block, MicroBatch, ParamBuilder, TrainPass};

use super::attention::{self, Attention};
use super::config::LlamaConfig;
use super::mlp::{self, Mlp};
use super::norm::Norm;
use super::rotary::RotaryTable;

/// A decoder layer; a [`Block`] from (b, t, hidden) to (b, t, hidden).
#[derive(Clone)]
pub struct DecoderLayer {
    input_layernorm: Norm,
    self_attn: Attention,
    post_attention_layernorm: Norm,
    mlp: Mlp,
}

/// What the backward pass needs: the layer's input, what comes after attention, and what the two parts kept.
struct Saved {
    xs: Tensor,
    attention: attention::Saved,
    middle: Tensor,
    mlp: mlp::Saved,
}

impl DecoderLayer {
    pub(super) fn new(
        config: &LlamaConfig,
        rotary: Arc<RotaryTable>,
        tp: &ProcessGroup,
        vb: ParamBuilder,
    ) -> Result<Self> {
        Ok(Self {
            input_layernorm: Norm::new(config, vb.pp("input_layernorm"))?,
            self_attn: Attention::new(config, rotary, tp, vb.pp("self_attn"))?,
            post_attention_layernorm: Norm::new(config, vb.pp("post_attention_layernorm"))?,
            mlp: Mlp::new(config, tp, vb.pp("mlp"))?,
        })
    }

    fn run(&self, xs: &Tensor) -> Result<(Tensor, Saved)> {
        let normed = self.input_layernorm.forward(xs)?;
        let (middle, attention) = self.self_attn.forward(normed, xs)?;
        let normed = self.post_attention_layernorm.forward(&middle)?;
        let (out, mlp) = self.mlp.forward(normed, &middle)?;
        let saved = Saved {
            xs: xs.clone(),
            attention,
            middle,
            mlp,
        };
        Ok((out, saved))
    }

    fn backward(&self, saved: Saved, dy: &Tensor, pass: &mut TrainPass<'_>) -> Result<Tensor> {
        let gradients = &mut *pass.gradients;
        let dnormed = self.mlp.backward(saved.mlp, dy, gradients)?;
        let norm = &self.post_attention_layernorm;
        let dmiddle = norm.backward(&saved.middle, &dnormed, Some(dy), gradients)?;
        let dnormed = self
            .self_attn
            .backward(saved.attention, &dmiddle, gradients)?;
        let norm = &self.input_layernorm;
        norm.backward(&saved.xs, &dnormed, Some(&dmiddle), gradients)
    }
}

impl Block for DecoderLayer {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        Ok(self.run(xs)?.0)
    }

    fn forward_train(
        &self,
        xs: &Tensor,
        _batch: &MicroBatch,
        _pass: &mut TrainPass<'_>,
    ) -> Result<Option<(Tensor, Backward)>> {
        let (out, saved) = self.run(xs)?;
        let layer = self.clone();
        let backward: Backward =
            Box::new(move |dy, pass| layer.backward(saved, &dy, pass).map(Some));
        Ok(Some((out, backward)))
    }
}
