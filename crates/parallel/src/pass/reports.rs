//! Numbers that blocks report while they are trained.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

/// What was reported under a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reported {
    /// The bits of its sum, which JSON has no number for if it is NaN or infinite.
    sum_bits: u64,
    /// How often it was; 0 of a loss, which is divided as the loss of the head is.
    pub count: u64,
}

impl Reported {
    fn new(sum: f64, count: u64) -> Self {
        Self {
            sum_bits: sum.to_bits(),
            count,
        }
    }

    /// Its sum.
    pub fn sum(self) -> f64 {
        f64::from_bits(self.sum_bits)
    }

    /// Whether it is a loss, which all tensor-parallel ranks train on.
    pub fn is_loss(self) -> bool {
        self.count == 0
    }

    /// A hash of what is reported under a name; the same for all NaNs.
    pub fn condensed(self, name: &str) -> u64 {
        let sum = if self.sum().is_nan() {
            f64::NAN
        } else {
            self.sum() + 0.0
        };
        let mut hasher = XxHash64::default();
        (name, sum.to_bits(), self.count).hash(&mut hasher);
        hasher.finish()
    }

    /// With what others have reported under the name.
    pub fn plus(self, other: Self) -> Self {
        Self::new(self.sum() + other.sum(), self.count + other.count)
    }
}

/// Sums of what blocks of a micro-batch have reported, by name.
#[derive(Debug, Default)]
pub(super) struct Reports(Mutex<BTreeMap<String, (Tensor, u64)>>);

impl Reports {
    /// Adds a number under `name`, which counts as `count`.
    pub fn add(&self, name: &str, value: &Tensor, count: u64) -> Result<()> {
        if value.rank() != 0 {
            bail!(
                "what is reported as {name} has shape {:?}; expected a scalar",
                value.shape()
            );
        }
        let value = value.detach().to_dtype(DType::F64)?;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = match all.remove(name) {
            None => (value, count),
            Some((earlier, before)) => ((earlier + value)?, before + count),
        };
        all.insert(name.to_string(), sum);
        Ok(())
    }

    /// The sums, for which a GPU is waited for if there are any.
    pub fn read(&self) -> Result<BTreeMap<String, Reported>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = |(name, (sum, count)): (&String, &(Tensor, u64))| {
            let sum = sum.to_scalar::<f64>()?;
            Ok((name.clone(), Reported::new(sum, *count)))
        };
        all.iter().map(read).collect()
    }
}
