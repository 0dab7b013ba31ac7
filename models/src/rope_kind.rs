//! Kinds of rotary frequencies (arXiv:2104.09864), as `transformers` computes them: θ^(−2i/d) for pair i of a head of d values, and
//! what was found to let a model read longer texts than it was trained on.

use std::f64::consts::PI;

use candle_core::{Result, bail};
use serde::Serialize;

/// Scaling of the rotary frequencies, by its name in config.json.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum RopeKind {
    /// None.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// How many times longer the context is.
        factor: f64,
    },
    /// A larger base for sequences longer than `max_position_embeddings`, the larger the longer they are.
    Dynamic {
        /// How fast the base grows.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, those between interpolated by their wavelengths.
    Llama3 {
        /// How many times longer the context is.
        factor: f64,
        /// The original context divided by this is the shortest wavelength that is fully scaled.
        low_freq_factor: f64,
        /// The original context divided by this is the longest wavelength that is kept.
        high_freq_factor: f64,
        /// Context length before scaling.
        original_max_position_embeddings: usize,
    },
    /// YaRN (arXiv:2309.00071): the same with a ramp over the pairs, and longer queries and keys.
    Yarn {
        /// How many times longer the context is.
        factor: f64,
        /// Context length before scaling.
        original_max_position_embeddings: usize,
        /// What cosines and sines are multiplied by.
        attention_factor: f64,
        /// A pair that turns so often in the original context keeps its frequency.
        beta_fast: f64,
        /// The frequency of one that turns so often only is divided by `factor`.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
    },
}

/// YaRN's factor of cosines and sines (arXiv:2309.00071, equation 22), where `mscale` is 1; its logarithm times `mscale`.
pub(crate) fn yarn_attention_factor(factor: f64, mscale: f64) -> f64 {
    match factor > 1.0 {
        true => 0.1 * mscale * factor.ln() + 1.0,
        false => 1.0,
    }
}

impl RopeKind {
    /// Frequency of each pair of a head, in radians per position, for sequences of `t` tokens.
    pub(crate) fn frequencies(
        &self,
        theta: f64,
        head_dim: usize,
        t: usize,
        max_positions: usize,
    ) -> Vec<f32> {
        let theta = match *self {
            Self::Dynamic { factor } => {
                let (longer, d) = (t.max(max_positions) as f64, head_dim as f64);
                let growth = factor * longer / max_positions as f64 - (factor - 1.0);
                theta * growth.powf(d / (d - 2.0))
            }
            _ => theta,
        };
        let base = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            (1.0 / theta.powf(f64::from(exponent))) as f32
        };
        let scaled = |pair| self.scaled(base(pair), pair, theta, head_dim);
        (0..head_dim / 2).map(scaled).collect()
    }

    fn scaled(&self, freq: f32, pair: usize, theta: f64, head_dim: usize) -> f32 {
        let wide = f64::from(freq);
        match *self {
            Self::Default | Self::Dynamic { .. } => freq,
            Self::Linear { factor } => freq / factor as f32,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * wide / (2.0 * PI);
                if turns > high {
                    freq
                } else if turns < low {
                    (wide / factor) as f32
                } else {
                    let kept = (turns - low) / (high - low);
                    ((1.0 - kept) * wide / factor + kept * wide) as f32
                }
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let d = head_dim as f64;
                // The pair, not whole, that turns so often in the original context.
                let pair_of = |turns: f64| {
                    let context = original_max_position_embeddings as f64;
                    d * (context / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(d - 1.0));
                if low == high {
                    high += 0.001;
                }
                let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                (divided * wide / factor + (1.0 - divided) * wide) as f32
            }
        }
    }

    /// What cosines and sines are multiplied by.
    pub(crate) fn attention_factor(&self) -> f32 {
        match *self {
            Self::Yarn {
                attention_factor, ..
            } => attention_factor as f32,
            _ => 1.0,
        }
    }

    pub(crate) fn max_seq_len(&self, max_position_embeddings: usize) -> usize {
        let (factor, original) = match *self {
            Self::Dynamic { .. } => return usize::MAX,
            Self::Linear { factor } => (factor, max_position_embeddings),
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                ..
            } => (factor, original_max_position_embeddings),
            _ => return max_position_embeddings,
        };
        max_position_embeddings.max((factor * original as f64) as usize)
    }

    /// An error that names a number that makes no sense.
    pub(crate) fn check(&self, theta: f64) -> Result<()> {
        let mut positive = vec![("rope_theta", theta)];
        let context = |tokens: usize| ("original_max_position_embeddings", tokens as f64);
        match *self {
            Self::Default => {}
            Self::Linear { factor } | Self::Dynamic { factor } => {
                positive.push(("factor", factor));
            }
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings,
            } => {
                if low >= high {
                    bail!(
                        "low_freq_factor is {low} and high_freq_factor {high}; expected the first to be smaller"
                    );
                }
                positive.extend([
                    ("low_freq_factor", low),
                    ("high_freq_factor", high),
                    ("factor", factor),
                    context(original_max_position_embeddings),
                ]);
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings,
                attention_factor,
                beta_fast,
                beta_slow,
                ..
            } => {
                positive.extend([
                    ("beta_fast", beta_fast),
                    ("beta_slow", beta_slow),
                    ("factor", factor),
                    context(original_max_position_embeddings),
                    ("attention_factor", attention_factor),
                ]);
            }
        }
        for (name, value) in positive {
            if !(value > 0.0 && value.is_finite()) {
                bail!("{name} is {value}; expected a positive number");
            }
        }
        Ok(())
    }
}
