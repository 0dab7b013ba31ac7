//! Text from a model in training, through the same stages on the same ranks.

use std::ops::ControlFlow;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_parallel::{KeyValueCache, ModelPart, Pass, Pipeline};

use super::sampler::Sampler;

/// What bounds a generated text.
#[derive(Clone, Debug)]
pub struct GenerateConfig {
    /// Longest sequence the model is given; older tokens are dropped.
    pub max_context: usize,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// Tokens that end the text.
    pub eos_ids: Vec<u32>,
    /// Whether the model's layers keep the keys and values of earlier tokens: those of a model of one's own may know of no cache.
    pub use_cache: bool,
}

/// Continues `prompt` and returns the new tokens, without the final end-of-text token.
///
/// `on_token` sees the new tokens so far after each of them, and says whether the text goes on; it must say the same on every rank.
/// Every rank of the model must call it, with equal samplers: all of them see the same logits and choose the same tokens.
/// With a cache the prompt takes one forward pass and each new token one of a token alone; without, each token one over the whole context.
///
/// # Errors
/// An empty prompt, logits from which nothing can be chosen, an error of `on_token`, and what ends collectives.
pub fn generate(
    pipeline: &Pipeline,
    part: &ModelPart,
    prompt: &[u32],
    config: &GenerateConfig,
    sampler: &mut Sampler,
    mut on_token: impl FnMut(&[u32]) -> Result<ControlFlow<()>>,
) -> Result<Vec<u32>> {
    if prompt.is_empty() {
        bail!("the prompt has no tokens; expected at least one");
    }
    let mut ids = prompt.to_vec();
    let mut cache = config.use_cache.then(KeyValueCache::default);
    // Tokens of which the cache has the keys and values.
    let mut num_cached = 0;
    for _ in 0..config.max_new_tokens {
        if ids.len() > config.max_context {
            // Positions move with the context.
            cache = None;
        }
        let start = match cache {
            Some(_) => num_cached,
            None => ids.len().saturating_sub(config.max_context),
        };
        let new = &ids[start..];
        let pass = Pass::infer(Tensor::from_slice(new, (1, new.len()), &Device::Cpu)?);
        let pass = match &cache {
            Some(cache) => pass.with_cache(cache.clone()),
            None => pass,
        };
        let logits = pipeline.logits(part, &pass, &[new.len() - 1])?.get(0)?;
        num_cached = ids.len();
        let id = sampler.sample(&logits.to_dtype(DType::F32)?.to_vec1::<f32>()?, &ids)?;
        if config.eos_ids.contains(&id) {
            break;
        }
        ids.push(id);
        if on_token(&ids[prompt.len()..])?.is_break() {
            break;
        }
    }
    Ok(ids.split_off(prompt.len()))
}
