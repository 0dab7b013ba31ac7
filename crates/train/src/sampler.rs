//! Choice of the next token, by candle-transformers' `LogitsProcessor`: the most likely one, or at random from the nucleus of
//! `softmax(logits / temperature)` (arXiv:1904.09751).

use candle_core::{Device, Result, Tensor, bail};
use candle_transformers::generation::LogitsProcessor;
use serde::{Deserialize, Serialize};

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingConfig {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f64,
    /// The smallest set of most likely tokens with at least this probability together is sampled from; 1 is all tokens.
    pub top_p: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl SamplingConfig {
    /// # Errors
    /// `temperature` is negative or not finite, or `top_p` is not above 0 and at most 1.
    pub fn validate(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            bail!(
                "temperature is {}, expected a finite number of at least 0",
                self.temperature
            );
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            bail!(
                "top_p is {}, expected a probability above 0 and at most 1",
                self.top_p
            );
        }
        Ok(())
    }
}

/// Chooses tokens; two samplers with one configuration choose the same ones.
pub struct Sampler(LogitsProcessor);

impl Sampler {
    /// # Errors
    /// [`SamplingConfig::validate`] fails.
    pub fn new(config: SamplingConfig) -> Result<Self> {
        config.validate()?;
        let SamplingConfig {
            temperature,
            top_p,
            seed,
        } = config;
        // The processor computes in f32, in which a smaller number would be 0.
        let top_p = top_p.max(f64::from(f32::MIN_POSITIVE));
        let processor = LogitsProcessor::new(seed, Some(temperature), Some(top_p));
        Ok(Self(processor))
    }

    /// Chooses the next token from its `logits`, one per token of the vocabulary; -inf excludes a token. Of equally likely
    /// tokens the one with the lower id comes first.
    ///
    /// # Errors
    /// There are no logits, one of them is NaN or +inf, or all are -inf.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let is_bad = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
        if let Some(id) = logits.iter().position(is_bad) {
            bail!(
                "the logit of token {id} is {}, expected finite numbers\nhint: the weights have diverged; lower the learning rate",
                logits[id]
            );
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            bail!(
                "none of the {} tokens has a logit above -inf, so there is nothing to choose",
                logits.len()
            );
        }
        // The largest becomes 0, so that no quotient by a small temperature is infinite.
        let logits = logits.iter().map(|logit| logit - max);
        self.0.sample(&Tensor::from_iter(logits, &Device::Cpu)?)
    }
}
