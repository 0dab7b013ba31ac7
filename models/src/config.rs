//! The hyper-parameters of a model.

use candle_core::{Result, bail};
use serde::Serialize;

use crate::activation::Activation;
use crate::family::Family;
use crate::rope_kind::RopeKind;

/// Largest of most sizes.
const MAX_SIZE: usize = 1 << 31;
/// Largest width of a head.
const MAX_HEAD_DIM: usize = 1 << 16;
/// Most decoder layers.
const MAX_LAYERS: usize = 1 << 16;
/// Most values in all weights: their bytes, in any type, are a number that 64 bits hold.
const MAX_VALUES: u128 = 1 << 48;

/// Everything about a model that is not a weight: what the computation depends on, and the family in whose words `config.json`
/// says it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelConfig {
    /// Whose `config.json` it is; the computation does not depend on it.
    #[serde(skip)]
    pub family: &'static Family,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key/value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// ε of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the rotary frequencies are scaled.
    #[serde(skip)]
    pub rope: RopeKind,
    /// Longest sequence, but for scaled frequencies that say otherwise: see [`Self::max_seq_len`].
    pub max_position_embeddings: usize,
    /// Whether the head uses the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have a bias.
    #[serde(skip)]
    pub qkv_bias: bool,
    /// Whether attention's output projection has a bias.
    #[serde(skip)]
    pub o_bias: bool,
    /// Whether gate, up and down have a bias.
    #[serde(skip)]
    pub mlp_bias: bool,
    /// What the MLP does to its gate.
    #[serde(skip)]
    pub activation: Activation,
    /// Whether norms multiply by 1 + weight.
    #[serde(skip)]
    pub norm_adds_one: bool,
    /// What embeddings are multiplied by, rounded to the type of the weights.
    #[serde(skip)]
    pub embedding_scale: f64,
    /// Whether each head of q and k is normalised.
    #[serde(skip)]
    pub qk_norm: bool,
    /// How many tokens each layer's attention sees, a token itself included; `None`: it and all before. Empty: no layer has a window.
    #[serde(skip)]
    pub windows: Vec<Option<usize>>,
    /// Token whose embedding gets no gradient, unless the head uses it too: `padding_idx` of `torch.nn.Embedding`.
    pub pad_token_id: Option<u32>,
    /// First token of a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    #[serde(skip)]
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// How many tokens the attention of layer `index` sees, if not all.
    pub fn window(&self, index: usize) -> Option<usize> {
        self.windows.get(index).copied().flatten()
    }

    /// (query, key/value) heads of the one of `tp` tensor-parallel ranks that has fewest query heads.
    pub fn heads_of_rank(&self, tp: usize) -> (usize, usize) {
        let fewest = self.num_attention_heads / tp.max(1);
        (fewest, self.num_key_value_heads.div_ceil(tp.max(1)))
    }

    /// Longest sequence: the factor of linear frequencies times `max_position_embeddings`, YaRN's times the original context, if that
    /// is more, and any with dynamic frequencies.
    pub fn max_seq_len(&self) -> usize {
        self.rope.max_seq_len(self.max_position_embeddings)
    }

    /// Longest text that the model continues: as [`Self::max_seq_len`], and any where all layers have windows, which go on without the oldest tokens.
    pub fn max_text_len(&self) -> usize {
        let is_windowed = (0..self.num_hidden_layers).all(|layer| self.window(layer).is_some());
        if is_windowed {
            return usize::MAX;
        }
        self.max_seq_len()
    }

    /// Longest sequence without YaRN; `None` if the frequencies are scaled in another way.
    pub fn original_context(&self) -> Option<usize> {
        match self.rope {
            RopeKind::Default => Some(self.max_position_embeddings),
            RopeKind::Yarn {
                original_max_position_embeddings,
                ..
            } => Some(original_max_position_embeddings),
            _ => None,
        }
    }

    /// An error with names and numbers if the sizes are out of range or do not fit each other.
    ///
    /// # Errors
    /// The first such number, by name.
    pub fn validate(&self) -> Result<()> {
        self.check_ranges()?;
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            bail!(
                "num_attention_heads({}) is not a multiple of num_key_value_heads({})",
                self.num_attention_heads,
                self.num_key_value_heads
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            bail!(
                "head_dim is {}; expected an even number, as rotary embeddings turn pairs",
                self.head_dim
            );
        }
        self.check_num_values()?;
        self.rope.check(self.rope_theta)?;
        self.check_frequencies()?;
        self.check_windows()?;
        if !(self.rms_norm_eps >= 0.0 && self.rms_norm_eps.is_finite()) {
            bail!(
                "rms_norm_eps is {}; expected a number >= 0",
                self.rms_norm_eps
            );
        }
        Ok(())
    }

    pub(crate) fn check_ranges(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, MAX_SIZE),
            ("hidden_size", self.hidden_size, MAX_SIZE),
            ("intermediate_size", self.intermediate_size, MAX_SIZE),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, MAX_SIZE),
            ("num_key_value_heads", self.num_key_value_heads, MAX_SIZE),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                MAX_SIZE,
            ),
        ];
        for (name, size, max) in sizes {
            if size == 0 {
                bail!("{name} is 0; expected at least 1");
            }
            if size > max {
                bail!("{name} is {size}; expected at most {max}");
            }
        }
        Ok(())
    }

    /// Bounds the number of values in all weights, and so every product of sizes.
    fn check_num_values(&self) -> Result<()> {
        let [
            vocab,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
        ] = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        ]
        .map(|size| size as u128);
        // Within their ranges these are far from the end of 128 bits.
        let attention = 2 * hidden * head_dim * (heads + kv_heads);
        let num_values = 2 * vocab * hidden + layers * (attention + 3 * hidden * intermediate);
        if num_values > MAX_VALUES {
            bail!(
                "the weights would have {num_values} values; expected at most {MAX_VALUES} (vocab_size({vocab}), hidden_size({hidden}), intermediate_size({intermediate}), num_hidden_layers({layers}), num_attention_heads({heads}), num_key_value_heads({kv_heads}), head_dim({head_dim}))"
            );
        }
        Ok(())
    }

    fn check_frequencies(&self) -> Result<()> {
        let (max, head_dim) = (self.max_position_embeddings, self.head_dim);
        let frequencies = self.rope.frequencies(self.rope_theta, head_dim, 1, max);
        let mut pairs = frequencies.iter().enumerate();
        if let Some((pair, frequency)) = pairs.find(|(_, frequency)| !frequency.is_finite()) {
            bail!(
                "the rotary frequency of pair {pair} is {frequency} with rope_theta({}) and {:?}; expected a finite number",
                self.rope_theta,
                self.rope
            );
        }
        Ok(())
    }

    fn check_windows(&self) -> Result<()> {
        let (num_windows, num_layers) = (self.windows.len(), self.num_hidden_layers);
        if num_windows != 0 && num_windows != num_layers {
            bail!(
                "there are {num_windows} windows; expected one for each of num_hidden_layers({num_layers}), or none"
            );
        }
        if self.windows.contains(&Some(0)) {
            bail!("sliding_window is 0; expected at least 1");
        }
        Ok(())
    }
}
