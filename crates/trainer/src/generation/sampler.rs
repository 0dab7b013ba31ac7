//! Choice of the next token, by candle-transformers' `LogitsProcessor`: the most likely one, or at random from the nucleus of
//! `softmax(logits / temperature)` (arXiv:1904.09751), in the order of transformers: repetition penalty, temperature, top-k, top-p.

use candle_core::{Device, Result, Tensor, bail};
use candle_transformers::generation::LogitsProcessor;
use candle_transformers::utils::apply_repeat_penalty;
use serde::{Deserialize, Serialize};

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingConfig {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f64,
    /// So many most likely tokens are sampled from, and those that are as likely as the last of them; 0 is all tokens.
    pub top_k: usize,
    /// Of these the smallest set of most likely tokens with at least this probability together is sampled from; 1 is all of them.
    pub top_p: f64,
    /// Logits of tokens that were there before are divided by it, those below 0 multiplied (arXiv:1909.05858); 1 changes nothing.
    pub repetition_penalty: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for SamplingConfig {
    /// Always the most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingConfig {
    /// # Errors
    /// `temperature` is negative or not finite, `top_p` is not above 0 and at most 1, or `repetition_penalty` not above 0 and finite.
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
        let penalty = self.repetition_penalty;
        if !(penalty.is_finite() && penalty > 0.0) {
            bail!("repetition_penalty is {penalty}, expected a finite number above 0");
        }
        Ok(())
    }
}

/// Chooses tokens; two samplers with one configuration choose the same ones.
pub struct Sampler {
    processor: LogitsProcessor,
    top_k: usize,
    repetition_penalty: f32,
}

impl Sampler {
    /// # Errors
    /// [`SamplingConfig::validate`] fails.
    pub fn new(config: SamplingConfig) -> Result<Self> {
        config.validate()?;
        let SamplingConfig {
            temperature,
            top_k,
            top_p,
            repetition_penalty,
            seed,
        } = config;
        // The processor computes in f32, in which a smaller number would be 0.
        let top_p = top_p.max(f64::from(f32::MIN_POSITIVE));
        Ok(Self {
            processor: LogitsProcessor::new(seed, Some(temperature), Some(top_p)),
            top_k,
            repetition_penalty: repetition_penalty as f32,
        })
    }

    /// Chooses the next token from its `logits`, one per token of the vocabulary, after the tokens `earlier`; -inf excludes a token. Of
    /// equally likely tokens the one with the lower id comes first.
    ///
    /// # Errors
    /// There are no logits, one of them is NaN or +inf, or all are -inf.
    pub fn sample(&mut self, logits: &[f32], earlier: &[u32]) -> Result<u32> {
        let is_bad = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
        if let Some(id) = logits.iter().position(is_bad) {
            bail!(
                "the logit of token {id} is {}, expected finite numbers\nhint: the weights have diverged; lower the learning rate",
                logits[id]
            );
        }
        let mut logits = Tensor::from_slice(logits, logits.len(), &Device::Cpu)?;
        if self.repetition_penalty != 1.0 {
            logits = apply_repeat_penalty(&logits, self.repetition_penalty, earlier)?;
        }
        let mut logits = logits.to_vec1::<f32>()?;
        keep_largest(&mut logits, self.top_k);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            bail!(
                "none of the {} tokens has a logit above -inf, so there is nothing to choose",
                logits.len()
            );
        }
        // The largest becomes 0, so that no quotient by a small temperature is infinite.
        let logits = logits.into_iter().map(|logit| logit - max);
        self.processor
            .sample(&Tensor::from_iter(logits, &Device::Cpu)?)
    }
}

/// Excludes the tokens whose logit is below that of the `k`-th; with 0 none.
fn keep_largest(logits: &mut [f32], k: usize) {
    if k == 0 || k >= logits.len() {
        return;
    }
    let mut sorted = logits.to_vec();
    let (_, least, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let least = *least;
    let below = logits.iter_mut().filter(|logit| **logit < least);
    below.for_each(|logit| *logit = f32::NEG_INFINITY);
}
