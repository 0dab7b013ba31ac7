//! Text from a model in training, through the same stages on the same ranks.

use candle_comm::ProcessGroup;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_parallel::{MicroBatch, Pipeline, Stage};

use crate::sampler::Sampler;

/// What bounds a generated text.
#[derive(Clone, Debug)]
pub struct GenerateConfig {
    /// Number of tokens of the model.
    pub vocab_size: usize,
    /// Longest sequence the model is given; older tokens are dropped.
    pub max_context: usize,
    /// Tokens to generate at most.
    pub max_new_tokens: usize,
    /// Tokens that end the text.
    pub eos_ids: Vec<u32>,
}

/// Continues `prompt` and returns the new tokens, without the final end-of-text token.
///
/// Every rank of the model must call it, with equal samplers: all of them see the same logits and choose the same tokens.
/// Each token costs a forward pass over the whole context: there is no key/value cache.
pub fn generate(
    stage: &Stage,
    pp: &ProcessGroup,
    prompt: &[u32],
    config: &GenerateConfig,
    sampler: &mut Sampler,
) -> Result<Vec<u32>> {
    if prompt.is_empty() {
        bail!("the prompt has no tokens; expected at least one");
    }
    let mut ids = prompt.to_vec();
    for _ in 0..config.max_new_tokens {
        let context = &ids[ids.len().saturating_sub(config.max_context)..];
        let last = context.len() - 1;
        let batch = MicroBatch {
            tokens: Tensor::from_slice(context, (1, context.len()), &Device::Cpu)?,
            targets: None,
            documents: None,
        };
        let last_position = |logits: Tensor| logits.get(0)?.get(last);
        let logits = Pipeline::infer(pp, stage, &batch, config.vocab_size, last_position)?;
        let id = sampler.sample(&logits.to_dtype(DType::F32)?.to_vec1::<f32>()?)?;
        if config.eos_ids.contains(&id) {
            break;
        }
        ids.push(id);
    }
    Ok(ids.split_off(prompt.len()))
}
