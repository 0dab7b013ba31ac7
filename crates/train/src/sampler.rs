//! Choice of the next token: greedy, or at random from the nucleus of `softmax(logits / temperature)` (arXiv:1904.09751).

use candle_core::{Result, bail};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
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
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplingConfig,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// # Errors
    /// [`SamplingConfig::validate`] fails.
    pub fn new(config: SamplingConfig) -> Result<Self> {
        config.validate()?;
        let rng = ChaCha8Rng::seed_from_u64(config.seed);
        Ok(Self { config, rng })
    }

    /// Chooses the next token from its `logits`, one per token of the vocabulary; -inf excludes a token. Of equally likely
    /// tokens the one with the lower id comes first.
    ///
    /// # Errors
    /// There are no logits, one of them is NaN or +inf, or all are -inf.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if let Some(id) = logits
            .iter()
            .position(|l| l.is_nan() || *l == f32::INFINITY)
        {
            bail!(
                "the logit of token {id} is {}, expected finite numbers\nhint: the weights have diverged; lower the learning rate",
                logits[id]
            );
        }
        let mut best = 0;
        for (id, logit) in logits.iter().enumerate() {
            if *logit > logits[best] {
                best = id;
            }
        }
        if logits.get(best).is_none_or(|max| *max == f32::NEG_INFINITY) {
            bail!(
                "none of the {} tokens has a logit above -inf, so there is nothing to choose",
                logits.len()
            );
        }
        if self.config.temperature == 0.0 {
            return Ok(best as u32);
        }
        let nucleus = self.nucleus(logits, f64::from(logits[best]));
        let total: f64 = nucleus.iter().map(|(_, p)| p).sum();
        // 53 random bits: a uniform number in [0, 1).
        let mut left = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for &(id, p) in &nucleus {
            if left < p {
                return Ok(id);
            }
            left -= p;
        }
        // Rounding can leave a remainder after the last token.
        Ok(nucleus.last().map_or(best as u32, |(id, _)| *id))
    }

    /// The most likely tokens, most likely first, with unnormalised probabilities `exp((logit - max) / temperature)`.
    fn nucleus(&self, logits: &[f32], max: f64) -> Vec<(u32, f64)> {
        let mut tokens: Vec<(u32, f64)> = (0u32..)
            .zip(logits)
            .map(|(id, l)| (id, ((f64::from(*l) - max) / self.config.temperature).exp()))
            .filter(|(_, p)| *p > 0.0)
            .collect();
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.config.top_p < 1.0 {
            let wanted = self.config.top_p * tokens.iter().map(|(_, p)| p).sum::<f64>();
            let mut sum = 0.0;
            let size = tokens.iter().take_while(|(_, p)| {
                let is_needed = sum < wanted;
                sum += p;
                is_needed
            });
            let size = size.count();
            tokens.truncate(size);
        }
        tokens
    }
}
