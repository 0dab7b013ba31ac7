//! One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

use std::sync::Arc;

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor};
use candle_nn::Init;
use candle_ops::rms_norm;
use candle_parallel::{Block, MicroBatch, ParamBuilder};

use super::attention::Attention;
use super::config::LlamaConfig;
use super::mlp::Mlp;
use super::rotary::RotaryTable;

/// A decoder layer; a [`Block`] from (b, t, hidden) to (b, t, hidden).
pub struct DecoderLayer {
    input_layernorm: Tensor,
    self_attn: Attention,
    post_attention_layernorm: Tensor,
    mlp: Mlp,
    eps: f64,
}

impl DecoderLayer {
    pub(super) fn new(
        config: &LlamaConfig,
        rotary: Arc<RotaryTable>,
        tp: &ProcessGroup,
        vb: ParamBuilder,
    ) -> Result<Self> {
        let norm = |name: &str| {
            vb.pp(name)
                .get(config.hidden_size, "weight", Init::Const(1.0))
        };
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::new(config, rotary, tp, vb.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, tp, vb.pp("mlp"))?,
            eps: config.rms_norm_eps,
        })
    }
}

impl Block for DecoderLayer {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        let normed = rms_norm(xs, &self.input_layernorm, self.eps)?;
        let xs = (xs + self.self_attn.forward(&normed)?)?;
        let normed = rms_norm(&xs, &self.post_attention_layernorm, self.eps)?;
        &xs + self.mlp.forward(&normed)?
    }
}
