//! What is to be saved, by name.

use candle_core::{DType, Error, Result};
use serde::{Deserialize, Serialize};

use crate::files::Checkpoint;
use crate::lora::LoraConfig;
use crate::params::{Parameters, SaveSource};

/// A model of which a run saves the parameters.
pub(super) struct SavedModel<'a> {
    pub params: Vec<ParamRecord>,
    /// Other tensors of the source: names, and which parameter each repeats.
    pub extras: Vec<(String, Option<String>)>,
    /// The checkpoint that the parameters came from.
    pub source: Option<&'a Checkpoint>,
    /// What adapters it has, which are all that is saved then.
    pub lora: Option<LoraConfig>,
}

/// A parameter of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ParamRecord {
    /// Hugging Face name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Form in which the ranks held it: the name of a type, or `q8_0` or `q4k`.
    pub dtype: String,
    /// Type in the source.
    pub stored_dtype: String,
    /// Whether it was trained.
    pub trainable: bool,
    #[serde(rename = "values_from")]
    pub(super) save_source: SaveSource,
}

impl ParamRecord {
    /// Type in the source.
    pub(super) fn stored_dtype(&self) -> Result<DType> {
        self.stored_dtype.parse().map_err(Error::wrap)
    }
}

impl<'a> SavedModel<'a> {
    /// The model of a run; `save_sources` tells of each parameter of the catalog where its values are from.
    pub fn of(params: &'a Parameters, save_sources: &[SaveSource]) -> Self {
        let entries = params.catalog().iter().zip(save_sources);
        let entries = entries.map(|(entry, &save_source)| ParamRecord {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            dtype: entry.form().to_string(),
            stored_dtype: entry.stored_dtype.as_str().to_string(),
            trainable: entry.trainable,
            save_source,
        });
        Self {
            params: entries.collect(),
            extras: params.extras(),
            source: params.checkpoint(),
            lora: params.lora().cloned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ParamRecord;

    /// Checkpoints that exist have these.
    #[test]
    fn the_names_in_the_file_of_a_parameter_are_read_and_written() {
        let text = r#"{"name":"w","shape":[2,3],"dtype":"f32","stored_dtype":"f32","trainable":true,"values_from":"Update"}"#;
        let record: ParamRecord = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
    }
}
