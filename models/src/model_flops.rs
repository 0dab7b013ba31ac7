//! The floating-point operations that training needs: to compare with what a GPU could do, and to divide a model into equal stages.

use crate::ModelConfig;
use candle_parallel::{BlockCosts, Parameters};

/// Operations per token of a step over sequences of `seq_len` tokens, as model FLOPs are counted (arXiv:2204.02311, appendix B):
/// 6 for each weight of a matrix product, 2 forward, 2 for the gradient of its input and 2 for its own, and
/// 12 · layers · heads · head_dim · seq_len / 2 for attention, whose causal half counts once; in a layer with a window, the part of
/// that half which is in the window.
///
/// A frozen weight has no gradient of its own: it counts 4. The embedding is a lookup and counts as the head only, if it is tied.
/// Nothing counts that is computed a second time.
pub fn flops_per_token(config: &ModelConfig, params: &Parameters, seq_len: usize) -> f64 {
    let is_lookup = |name: &str| name.contains("embed_tokens") && !config.tie_word_embeddings;
    let products = params
        .catalog()
        .iter()
        .filter(|entry| entry.shape.len() == 2 && !is_lookup(&entry.name));
    let weights: f64 = products
        .map(|entry| entry.num_values() as f64 * if entry.trainable { 6.0 } else { 4.0 })
        .sum();
    let width = config.num_attention_heads * config.head_dim;
    let attention = (0..config.num_hidden_layers).map(|layer| {
        let beyond = config
            .window(layer)
            .map_or(0, |window| seq_len.saturating_sub(window));
        (6 * width) as f64 * (seq_len as f64 - (beyond * beyond) as f64 / seq_len as f64)
    });
    weights + attention.sum::<f64>()
}

/// Time of the head for each of its operations, against a decoder layer's, forward and backward pass together: 0.88 to 1.00 with vocabularies of
/// 8,000 to 128,000, in f32 and bf16, as `bench_train --stage-secs` with `--pp 3 --pipeline-layout 0,N,0` tells.
const HEAD_COST: f64 = 0.95;
/// Time of the embedding, which copies and adds, for each of 6 operations a value, against a decoder layer's: 60 to 380 in the same runs.
const EMBEDDING_COST: f64 = 200.0;

/// What a token costs in the blocks of a model that is trained on sequences of `seq_len` tokens, in the operations of a decoder layer: the same on
/// every rank and in every run, so that ranks agree on the stages.
pub fn block_costs(config: &ModelConfig, seq_len: usize) -> BlockCosts {
    let hidden = config.hidden_size;
    let width = config.num_attention_heads * config.head_dim;
    let kv_width = config.num_key_value_heads * config.head_dim;
    let weights = hidden * (2 * width + 2 * kv_width + 3 * config.intermediate_size);
    BlockCosts {
        first: EMBEDDING_COST * (6 * hidden) as f64,
        layer: (6 * weights + 6 * width * seq_len) as f64,
        last: HEAD_COST * (6 * hidden * config.vocab_size) as f64,
    }
}
