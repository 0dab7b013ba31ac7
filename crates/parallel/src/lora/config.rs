//! Which linear layers get an adapter, and of what size.

use std::collections::BTreeSet;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// The low-rank adapters of a model: see [`ParamStore::with_lora`](crate::ParamStore::with_lora).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraConfig {
    /// Width r of the product: A is (r, in), B is (out, r).
    pub rank: usize,
    /// α: the product is multiplied by [`Self::scale`].
    pub alpha: f64,
    /// Probability with which a feature of an adapter's input is dropped in training.
    pub dropout: f64,
    /// The layers.
    pub targets: LoraTargets,
    /// Whether the scale is α/√r instead of α/r (arXiv:2312.03732).
    pub use_rslora: bool,
    /// Seed of the initial A and of dropout.
    pub seed: u64,
    /// The folder or repository of the model whose adapter it is, for those who load it.
    pub base_model: Option<String>,
}

impl Default for LoraConfig {
    /// Rank 16, α 16, all linear layers, no dropout.
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 16.0,
            dropout: 0.0,
            targets: LoraTargets::AllLinear,
            use_rslora: false,
            seed: 0,
            base_model: None,
        }
    }
}

/// The linear layers that get an adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LoraTargets {
    /// All but those of the model's last block, the head.
    AllLinear,
    /// Those whose whole name or last parts are one of these, such as `q_proj` or `layers.0.mlp.up_proj`.
    Names(Vec<String>),
}

impl LoraConfig {
    /// What the product is multiplied by: α/r, or α/√r with [`Self::use_rslora`].
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        match self.use_rslora {
            true => self.alpha / rank.sqrt(),
            false => self.alpha / rank,
        }
    }

    /// An error if a number is out of range or no layer is named.
    ///
    /// # Errors
    /// The first number out of range, or that no layer is named.
    pub fn validate(&self) -> Result<()> {
        if self.rank == 0 {
            bail!("the rank of low-rank adapters is 0; expected at least 1");
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            bail!(
                "alpha of low-rank adapters is {}; expected a number > 0",
                self.alpha
            );
        }
        if !(0.0..1.0).contains(&self.dropout) {
            bail!(
                "the dropout of low-rank adapters is {}; expected a probability >= 0 and < 1",
                self.dropout
            );
        }
        match &self.targets {
            LoraTargets::Names(names) if names.iter().all(String::is_empty) => {
                bail!("no linear layer is named that should get a low-rank adapter")
            }
            _ => Ok(()),
        }
    }
}

impl LoraTargets {
    /// Whether layer `module` gets an adapter; `is_head` is whether it is one of the model's last block.
    pub(crate) fn contains(&self, module: &str, is_head: bool) -> bool {
        match self {
            Self::AllLinear => !is_head,
            Self::Names(names) => names.iter().any(|name| is_named(module, name)),
        }
    }

    /// The first name that none of these layers has.
    pub(crate) fn unmatched<'a>(&'a self, modules: &BTreeSet<&str>) -> Option<&'a str> {
        let Self::Names(names) = self else {
            return None;
        };
        let is_matched = |name: &&String| modules.iter().any(|module| is_named(module, name));
        names
            .iter()
            .find(|name| !is_matched(name))
            .map(String::as_str)
    }
}

fn is_named(module: &str, name: &str) -> bool {
    let before = module.strip_suffix(name);
    !name.is_empty() && before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
