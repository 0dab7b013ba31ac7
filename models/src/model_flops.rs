//! The floating-point operations that training needs, to compare with what a GPU could do.

use crate::ModelConfig;
use candle_parallel::Parameters;

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
