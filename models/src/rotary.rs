//! Rotary position embeddings (arXiv:2104.09864): angle(p, i) = p·θ^(−2i/d), scaled as config.json says.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor, bail};

use crate::config::{ModelConfig, RopeKind};

/// Cosines and sines of all positions, made for the longest sequence seen so far.
pub struct RotaryTable {
    inv_freq: Vec<f32>,
    max_positions: usize,
    device: Device,
    cached: Mutex<Option<(Tensor, Tensor)>>,
}

impl RotaryTable {
    /// The table of this configuration's angles, on `device`.
    pub fn new(config: &ModelConfig, device: &Device) -> Self {
        Self {
            inv_freq: inv_freq(config),
            max_positions: config.max_position_embeddings,
            device: device.clone(),
            cached: Mutex::new(None),
        }
    }

    /// (cos, sin) of positions 0..t, each (t, head_dim / 2).
    ///
    /// # Errors
    /// More positions than the configuration allows.
    pub fn get(&self, t: usize) -> Result<(Tensor, Tensor)> {
        if t > self.max_positions {
            bail!(
                "a sequence of {t} tokens is longer than max_position_embeddings ({})\nhint: use a shorter --seq-len",
                self.max_positions
            );
        }
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((cos, sin)) = &*cached
            && cos.dim(0)? >= t
        {
            return Ok((cos.narrow(0, 0, t)?, sin.narrow(0, 0, t)?));
        }
        // The product is rounded to f32 as transformers does, the functions are not.
        let angles =
            || (0..t).flat_map(|p| self.inv_freq.iter().map(move |f| f64::from(p as f32 * f)));
        let table = |of: fn(f64) -> f64| -> Result<Tensor> {
            let values: Vec<f32> = angles().map(|angle| of(angle) as f32).collect();
            let bytes = 4 * values.len();
            Tensor::from_vec(values, (t, self.inv_freq.len()), &self.device)
                .map_err(|err| err.context(format!("a table of {t} positions of {bytes} bytes")))
        };
        let made = (table(f64::cos)?, table(f64::sin)?);
        *cached = Some(made.clone());
        Ok(made)
    }
}

/// Frequency of each pair of a head, in radians per position.
fn inv_freq(config: &ModelConfig) -> Vec<f32> {
    let base = |pair: usize| {
        let exponent = (2 * pair) as f32 / config.head_dim as f32;
        (1.0 / config.rope_theta.powf(f64::from(exponent))) as f32
    };
    let scale = |freq: f32| match config.rope {
        RopeKind::Default => freq,
        RopeKind::Linear { factor } => freq / factor as f32,
        RopeKind::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let context = original_max_position_embeddings as f64;
            let frequency = f64::from(freq);
            let wavelength = 2.0 * std::f64::consts::PI / frequency;
            if wavelength < context / high_freq_factor {
                freq
            } else if wavelength > context / low_freq_factor {
                (frequency / factor) as f32
            } else {
                let smooth =
                    (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                ((1.0 - smooth) * frequency / factor + smooth * frequency) as f32
            }
        }
    };
    (0..config.head_dim / 2).map(base).map(scale).collect()
}
