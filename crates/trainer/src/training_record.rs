//! What a training checkpoint has beside the model and the optimizer: what the run was asked for, and where in the data it was.

use std::collections::BTreeMap;

use candle_core::{Result, bail};
use candle_data::DataPosition;
use candle_parallel::checkpoint::TrainingCheckpoint;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::evaluation::EvalHistory;
use crate::loss_range::LossHistory;

/// What a run notes in its checkpoints, and compares when it resumes.
///
/// There is no state of random generators to note: data orders and initial weights are functions of the seed, which is among the
/// settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingRecord {
    /// Values by name, such as `--lr`, on which the weights depend. A run may resume with others if its user insists.
    pub settings: BTreeMap<String, String>,
    /// Values by name, such as `--micro-batch-size`, on which only the order of sums depends, and so the last bits of the weights. Empty in
    /// checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sum_order: BTreeMap<String, String>,
    /// The model's configuration, which must be the same.
    pub model: Map<String, Value>,
    /// The next step's place in the data.
    pub position: DataPosition,
    /// Type of the saved weights; `None`: each tensor's own.
    pub save_dtype: Option<String>,
    /// What evaluations gave so far.
    pub evaluation: EvalHistory,
    /// The losses so far.
    #[serde(default, skip_serializing_if = "LossHistory::is_empty")]
    pub losses: LossHistory,
    /// Whether the weights have gradients of steps that come again after resuming: an asynchronous parameter server then has not stopped
    /// between two steps of all workers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeats_gradients: bool,
}

impl TrainingRecord {
    /// The record of a checkpoint.
    ///
    /// # Errors
    /// A checkpoint that another program wrote.
    pub fn of(checkpoint: &TrainingCheckpoint) -> Result<Self> {
        match serde_json::from_value(checkpoint.record().clone()) {
            Ok(record) => Ok(record),
            Err(err) => bail!(
                "the checkpoint {} has no record of a training run: {err}\nhint: another program wrote it",
                checkpoint.dir().display()
            ),
        }
    }

    /// What differs from the run that wrote `earlier`, in words; `insists`: its user accepts other settings.
    ///
    /// # Errors
    /// Another model, or other settings if they are not accepted.
    pub fn check(&self, earlier: &Self, insists: bool) -> Result<Vec<String>> {
        let models = differences(&self.model, &earlier.model, |value| value.to_string());
        if !models.is_empty() {
            bail!(
                "the model is not that of the checkpoint: {}\nhint: resume with the model that was trained",
                models.join("; ")
            );
        }
        let settings = differences(&self.settings, &earlier.settings, Clone::clone);
        if !settings.is_empty() && !insists {
            bail!(
                "this run is not the one of the checkpoint: {}\nhint: give the values of the checkpoint, or --resume-anyway",
                settings.join("; ")
            );
        }
        Ok(settings)
    }

    /// What makes sums of another order than in the run that wrote `earlier`, in words; empty if that is not known.
    pub fn other_sums(&self, earlier: &Self) -> Vec<String> {
        match earlier.sum_order.is_empty() {
            true => Vec::new(),
            false => differences(&self.sum_order, &earlier.sum_order, Clone::clone),
        }
    }
}

/// Names whose values differ, with both.
fn differences<'a, V: PartialEq + 'a>(
    own: impl IntoIterator<Item = (&'a String, &'a V)>,
    earlier: impl IntoIterator<Item = (&'a String, &'a V)>,
    text: impl Fn(&V) -> String,
) -> Vec<String> {
    let own: BTreeMap<&String, &V> = own.into_iter().collect();
    let earlier: BTreeMap<&String, &V> = earlier.into_iter().collect();
    let mut names: Vec<&String> = own.keys().chain(earlier.keys()).copied().collect();
    names.sort();
    names.dedup();
    let words = |value: Option<&&V>| match value {
        Some(value) => text(value),
        None => "not given".to_string(),
    };
    let differing = names
        .into_iter()
        .filter(|name| own.get(name) != earlier.get(name));
    differing
        .map(|name| {
            format!(
                "{name} is {}, and {} in the checkpoint",
                words(own.get(name)),
                words(earlier.get(name))
            )
        })
        .collect()
}
