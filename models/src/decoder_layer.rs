//! One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_parallel::{GradientSink, Layer, LayerRanks, ParamBuilder, Pass, Tape};

use crate::attention::{Attention, SavedAttention};
use crate::config::ModelConfig;
use crate::mlp::{Mlp, SavedMlp};
use crate::norm::Norm;
use crate::rotary::RotaryTable;

/// A decoder layer; a [`Layer`] from (b, t, hidden) to (b, t, hidden). Norms of the heads of q and k get this rank's summand of their
/// gradients, as its heads give it.
#[derive(Clone)]
pub struct DecoderLayer {
    input_layernorm: Norm,
    self_attn: Attention,
    post_attention_layernorm: Norm,
    mlp: Mlp,
}

/// What the backward pass needs: the layer's input, what comes after attention, and what the two parts kept.
#[derive(Clone)]
pub struct SavedLayer {
    xs: Tensor,
    attention: SavedAttention,
    middle: Tensor,
    mlp: SavedMlp,
}

impl DecoderLayer {
    /// Layer `index` of a model, with the parameters below `vb`, divided over `ranks`.
    ///
    /// # Errors
    /// Parameters that are missing or do not fit, and more ranks than heads.
    pub fn new(
        config: &ModelConfig,
        index: usize,
        rotary: Arc<RotaryTable>,
        ranks: &LayerRanks,
        vb: ParamBuilder,
    ) -> Result<Self> {
        let width = config.hidden_size;
        let norm = |name| Norm::new(width, config, ranks.region.outside(), vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::new(config, index, rotary, ranks, vb.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(config, &ranks.region, vb.pp("mlp"))?,
        })
    }
}

impl Layer for DecoderLayer {
    type Saved = SavedLayer;

    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, SavedLayer)> {
        let normed = self.input_layernorm.forward(xs)?;
        let (middle, attention) = self.self_attn.forward(&normed, xs, pass)?;
        let normed = self.post_attention_layernorm.forward(&middle)?;
        let (out, mlp) = self.mlp.forward(&normed, &middle, pass)?;
        let saved = SavedLayer {
            xs: xs.clone(),
            attention,
            middle,
            mlp,
        };
        Ok((out, saved))
    }

    fn backward(
        &self,
        saved: SavedLayer,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        // The outputs of the norms are as large as the input and take next to no time to compute again.
        let norm = &self.post_attention_layernorm;
        let normed = self.mlp.reads_input().then(|| norm.forward(&saved.middle));
        let dnormed = self
            .mlp
            .backward(saved.mlp, normed.transpose()?, dy, pass, gradients)?;
        let dmiddle = norm.backward(&saved.middle, &dnormed, Some(dy), gradients)?;
        let norm = &self.input_layernorm;
        let normed = self
            .self_attn
            .reads_input()
            .then(|| norm.forward(&saved.xs));
        let normed = normed.transpose()?;
        let dnormed =
            self.self_attn
                .backward(saved.attention, normed, &dmiddle, pass, gradients)?;
        norm.backward(&saved.xs, &dnormed, Some(&dmiddle), gradients)
            .map(Some)
    }

    fn tape(&self) -> Option<Tape> {
        let (attention, mlp) = (self.self_attn.tape(), self.mlp.tape());
        let input = attention.input;
        Some(Tape {
            input,
            // And the sum between the two.
            saved: 2 * input + attention.saved + mlp.saved,
            waiting: attention.waiting + mlp.waiting,
            waiting_large: attention.waiting_large + mlp.waiting_large,
            waiting_without_weights: 0,
        })
    }

    fn weights(&self) -> Vec<&Tensor> {
        let norms = [&self.input_layernorm, &self.post_attention_layernorm].map(Norm::weight);
        let norms = norms.into_iter().chain(self.self_attn.weights());
        norms.chain(self.mlp.weights()).collect()
    }
}
