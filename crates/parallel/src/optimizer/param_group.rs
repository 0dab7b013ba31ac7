//! Parameters with a learning rate, decay or rule of their own.

use candle_core::{Result, bail};

use super::optimizer::Optimizer;

/// Parameters that are updated with other constants than the rest, or by another rule.
pub struct ParamGroup {
    matches: Box<dyn Fn(&str) -> bool + Send>,
    /// Factor of the learning rate.
    pub lr_scale: f64,
    /// Decay of all parameters of the group; `None`: the optimizer's own, for those of two or more dims.
    pub weight_decay: Option<f64>,
    rule: Option<Box<dyn Optimizer>>,
}

impl ParamGroup {
    /// The parameters whose Hugging Face name satisfies `matches` and that are in no group before this one.
    pub fn new(matches: impl Fn(&str) -> bool + Send + 'static) -> Self {
        Self {
            matches: Box::new(matches),
            lr_scale: 1.0,
            weight_decay: None,
            rule: None,
        }
    }

    /// The group with a learning rate of `lr_scale` times that of the others.
    pub fn with_lr_scale(self, lr_scale: f64) -> Self {
        Self { lr_scale, ..self }
    }

    /// The group with this decay for all its parameters, norms and biases too.
    pub fn with_weight_decay(self, weight_decay: f64) -> Self {
        Self {
            weight_decay: Some(weight_decay),
            ..self
        }
    }

    /// The group with a rule of its own, whose state is in memory for the parameters of the group alone.
    pub fn with_rule(self, rule: impl Optimizer + 'static) -> Self {
        Self {
            rule: Some(Box::new(rule)),
            ..self
        }
    }

    pub(super) fn rule(&self) -> Option<&dyn Optimizer> {
        self.rule.as_deref()
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        (self.matches)(name)
    }

    pub(super) fn validate(&self) -> Result<()> {
        if let Some(rule) = &self.rule {
            rule.validate()?;
        }
        let numbers = [
            ("lr_scale", self.lr_scale),
            ("weight_decay", self.weight_decay.unwrap_or(0.0)),
        ];
        for (name, value) in numbers {
            if !(value >= 0.0 && value.is_finite()) {
                bail!("a parameter group has {name} {value}; expected a number >= 0");
            }
        }
        Ok(())
    }
}
