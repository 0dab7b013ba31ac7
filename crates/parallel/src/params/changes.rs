//! Which parameters still have the values of their source: their stored values are exact, those of a narrower type are not.

use std::collections::BTreeMap;

use candle_comm::Mesh;
use candle_core::{DType, Result};
use serde::{Deserialize, Serialize};

use super::parameters::Parameters;
use crate::agreement::gather;

/// Who gave a parameter its present values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum SaveSource {
    /// The checkpoint or the distribution that it came from.
    #[default]
    Source,
    /// An optimizer.
    Update,
    /// A caller of [`Parameters::refill`].
    Refill,
}

impl Parameters {
    /// Remembers who gave parameter `index` new values.
    pub(crate) fn set_save_source(&self, index: usize, from: SaveSource) {
        self.changes()[index] = from;
    }

    /// Of each entry of the catalog, where its values are from, the same on every rank: a refill anywhere counts for all. Every
    /// rank must call it.
    pub(crate) fn save_sources(&self, mesh: &Mesh) -> Result<Vec<SaveSource>> {
        let own: BTreeMap<&str, SaveSource> = {
            let changes = self.changes();
            let all = self.iter().zip(changes.iter());
            all.map(|(param, &from)| (param.name.as_str(), from))
                .filter(|(_, from)| *from != SaveSource::Source)
                .collect()
        };
        let of_ranks: Vec<BTreeMap<String, SaveSource>> = gather(&mesh.world, &own)?;
        let mut changed: BTreeMap<String, SaveSource> = BTreeMap::new();
        for (name, from) in of_ranks.into_iter().flatten() {
            let known = changed.entry(name).or_default();
            *known = from.max(*known);
        }
        let entries = self.catalog().iter();
        let from = entries.map(|entry| changed.get(&entry.name).copied().unwrap_or_default());
        Ok(from.collect())
    }

    /// The local values of parameter `index` in f32 as its source has them, if they were rounded when they were read and are still
    /// the parameter's.
    pub(crate) fn unrounded(&self, index: usize) -> Result<Option<Vec<f32>>> {
        let param = self.get(index);
        let is_stored = self.checkpoint().is_some() || param.is_adapter;
        let exact = if is_stored {
            param.stored_dtype
        } else {
            DType::F32
        };
        if param.dtype() == exact || self.changes()[index] != SaveSource::Source {
            return Ok(None);
        }
        let values = self.source().values(&param.wanted())?;
        Ok(Some(values))
    }
}
