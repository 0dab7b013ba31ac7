//! What is asked of a model's parameters because some of them are low-rank adapters.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;

use candle_core::{Result, bail};

use super::model_spec::ModelSpec;
use super::parameters::Parameters;
use super::source::LoraSource;
use crate::files::Checkpoint;
use crate::lora::module_of;

impl ModelSpec {
    /// The layers of the model that have an adapter, in name order.
    pub fn adapted_layers(&self) -> BTreeSet<&str> {
        let adapters = self.params().iter().filter(|param| param.is_adapter);
        let names = adapters.filter_map(|param| module_of(&param.name));
        names.collect()
    }

    /// An error if adapters were asked for that no layer took; `linears` are layers that could have one.
    pub(super) fn check_adapters(
        &self,
        lora: Option<&LoraSource>,
        linears: &BTreeSet<String>,
    ) -> Result<()> {
        let Some(lora) = lora else {
            return Ok(());
        };
        let adapted = self.adapted_layers();
        // An adapter that was trained elsewhere may name layers of other models, too.
        let unmatched = match lora {
            LoraSource::Init(config) => config.targets.unmatched(&adapted),
            LoraSource::Trained(_) => None,
        };
        if unmatched.is_some() || adapted.is_empty() {
            let last = |name: &String| name.rsplit('.').next().unwrap_or_default().to_string();
            let names: BTreeSet<String> = linears.iter().map(last).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            bail!(
                "no linear layer that can have a low-rank adapter is called {}\nhint: there are {names}; embeddings and heads have none",
                unmatched.unwrap_or("so")
            );
        }
        match lora {
            LoraSource::Init(_) => Ok(()),
            LoraSource::Trained(adapter) => adapter.check_all_used(&adapted),
        }
    }
}

impl Parameters {
    /// The layers of the model that have an adapter, in name order, the same on every rank.
    pub fn adapted_layers(&self) -> BTreeSet<&str> {
        self.model().adapted_layers()
    }

    /// The folders that the parameters came from.
    pub(crate) fn source_dirs(&self) -> Vec<&Path> {
        let base = self.checkpoint().map(Checkpoint::dir);
        let adapter = match &self.source().lora {
            Some(LoraSource::Trained(adapter)) => Some(adapter.weights().dir()),
            Some(LoraSource::Init(_)) | None => None,
        };
        base.into_iter().chain(adapter).collect()
    }

    /// Notes how many updates have been made.
    pub(crate) fn set_num_updates(&self, num_updates: usize) {
        self.num_updates().store(num_updates, Ordering::Relaxed);
    }
}
