//! AdamW (arXiv:1711.05101) over flat buffers, one pass:
//! m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², θ ← θ(1 − ηλ) − η·(m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε).

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, bail};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::flat_buffer::{contiguous, contiguous_mut};

/// Constants of AdamW. Weight decay applies to parameters of two or more dims only: not to norms and biases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment's average, β₁.
    pub beta1: f64,
    /// Decay of the second moment's average, β₂.
    pub beta2: f64,
    /// Added to the root of the second moment, ε.
    pub eps: f64,
    /// Decoupled weight decay, λ.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        }
    }
}

impl AdamWConfig {
    /// An error that names the first constant which is out of its range.
    pub fn validate(&self) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                bail!("{name} is {beta}; expected 0 <= {name} < 1");
            }
        }
        if !(self.eps > 0.0 && self.eps.is_finite()) {
            bail!("eps is {}; expected a positive number", self.eps);
        }
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            bail!(
                "weight_decay is {}; expected a number >= 0",
                self.weight_decay
            );
        }
        Ok(())
    }
}

/// One update of a range of values: `values.inplace_op2(&gradient, &update)`.
pub(crate) struct AdamWUpdate<'a> {
    pub exp_avg: &'a Mutex<Vec<f32>>,
    pub exp_avg_sq: &'a Mutex<Vec<f32>>,
    /// Where the range's moments start in the two vectors.
    pub offset: usize,
    pub config: AdamWConfig,
    /// Decay of this parameter: `config.weight_decay` or 0.
    pub weight_decay: f64,
    pub lr: f64,
    /// Factor of the gradient, from clipping.
    pub grad_scale: f64,
    /// Number of this update, from 1.
    pub step: usize,
}

impl InplaceOp2 for AdamWUpdate<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        values: &mut CpuStorage,
        values_layout: &Layout,
        grads: &CpuStorage,
        grads_layout: &Layout,
    ) -> Result<()> {
        const CHUNK: usize = 16 * 1024;
        let values = contiguous_mut(values, values_layout)?;
        let grads = contiguous(grads, grads_layout)?;
        let range = self.offset..self.offset + values.len();
        let mut exp_avg = self.exp_avg.lock().unwrap_or_else(PoisonError::into_inner);
        let mut exp_avg_sq = self
            .exp_avg_sq
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let AdamWConfig {
            beta1, beta2, eps, ..
        } = self.config;
        let step = i32::try_from(self.step).unwrap_or(i32::MAX);
        let step_size = (self.lr / (1.0 - beta1.powi(step))) as f32;
        let correction = (1.0 / (1.0 - beta2.powi(step)).sqrt()) as f32;
        let shrink = (1.0 - self.lr * self.weight_decay) as f32;
        let (rest1, rest2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
        let (beta2, eps, scale) = (beta2 as f32, eps as f32, self.grad_scale as f32);
        values
            .par_chunks_mut(CHUNK)
            .zip(grads.par_chunks(CHUNK))
            .zip(exp_avg[range.clone()].par_chunks_mut(CHUNK))
            .zip(exp_avg_sq[range].par_chunks_mut(CHUNK))
            .for_each(|(((values, grads), exp_avg), exp_avg_sq)| {
                for (((x, g), m), v) in values.iter_mut().zip(grads).zip(exp_avg).zip(exp_avg_sq) {
                    let g = g * scale;
                    *m += (g - *m) * rest1;
                    *v = *v * beta2 + g * g * rest2;
                    *x = *x * shrink - step_size * *m / (v.sqrt() * correction + eps);
                }
            });
        Ok(())
    }
}
