//! AdamW (arXiv:1711.05101):
//! m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², θ ← θ(1 − ηλ) − η·(m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε).

use candle_core::{Result, bail};
use candle_ops::{AdamWBuffers, AdamWConstants, AdamWSlot, adamw};
use serde::{Deserialize, Serialize};

use super::optimizer::{Optimizer, ParamSlice, UpdateStep};

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
    /// The constants for batches that have `factor` times as many samples, with a learning rate √`factor` times as large: as many
    /// samples take the weights about as far, and β₂'s average and the decay go back as many samples (Malladi et al. 2022,
    /// arXiv:2205.10287). β₁ stays: gradients of workers that do not wait for each other have a momentum of their own (Mitliagkas et al.
    /// 2016, arXiv:1605.09774).
    pub fn scaled_to_batches(&self, factor: f64) -> Self {
        Self {
            beta1: self.beta1,
            beta2: 1.0 - factor * (1.0 - self.beta2),
            eps: self.eps / factor.sqrt(),
            weight_decay: self.weight_decay * factor.sqrt(),
        }
    }

    /// An error that names the first constant which is out of its range.
    ///
    /// # Errors
    /// The first constant out of its range.
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

/// The AdamW rule, one fused pass over each bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AdamW(pub AdamWConfig);

impl Optimizer for AdamW {
    fn describe(&self) -> String {
        format!("{self:?}")
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn takes_remainders(&self) -> bool {
        true
    }

    fn update(&self, slice: &ParamSlice<'_>, step: &UpdateStep) -> Result<()> {
        let [exp_avg, exp_avg_sq] = slice.state else {
            bail!("AdamW got {} kinds of state; expected 2", slice.state.len());
        };
        let slots = slice.weights.iter().map(|weight| AdamWSlot {
            weights: &weight.values,
            start: weight.start,
            decays: weight.is_matrix() || step.weight_decay.is_some(),
        });
        let buffers = AdamWBuffers {
            master: slice.master,
            exp_avg,
            exp_avg_sq,
            grad: slice.grad,
        };
        adamw(
            &buffers,
            &slots.collect::<Vec<_>>(),
            &self.0.constants(step),
        )
    }

    fn validate(&self) -> Result<()> {
        self.0.validate()
    }
}

impl AdamWConfig {
    fn constants(&self, step: &UpdateStep) -> AdamWConstants {
        let Self {
            beta1,
            beta2,
            eps,
            weight_decay,
        } = *self;
        let lr = step.lr;
        let weight_decay = step.weight_decay.unwrap_or(weight_decay);
        let number = i32::try_from(step.number).unwrap_or(i32::MAX);
        AdamWConstants {
            step_size: (lr / (1.0 - beta1.powi(number))) as f32,
            correction: (1.0 / (1.0 - beta2.powi(number)).sqrt()) as f32,
            decay_factor: (1.0 - lr * weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            eps: eps as f32,
            scale: step.grad_scale as f32,
        }
    }
}
