//! A trained adapter in the folder that `peft` saves and loads.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Result, bail};

use super::adapter_config;
use super::config::LoraConfig;
use crate::files::{Checkpoint, read_text_file};

/// Name of an adapter's configuration in its folder.
pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// Name of an adapter's weights in its folder.
pub const ADAPTER_WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// What stands before a parameter's name in an adapter's file.
const FILE_PREFIX: &str = "base_model.model.";
/// What a layer's name is followed by.
const MATRICES: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];

/// An adapter's folder, opened: the configuration read, the file mapped, no weight read yet.
#[derive(Debug)]
pub struct Adapter {
    config: LoraConfig,
    weights: Checkpoint,
}

/// The name that parameter `name` of an adapter has in its file.
pub(crate) fn file_name(name: &str) -> String {
    format!("{FILE_PREFIX}{name}")
}

/// The layer whose A or B a parameter is.
pub(crate) fn module_of(name: &str) -> Option<&str> {
    MATRICES.iter().find_map(|end| name.strip_suffix(end))
}

impl Adapter {
    /// Opens `dir`, which holds `adapter_config.json` and `adapter_model.safetensors`.
    ///
    /// # Errors
    /// Files that are missing or not what their names say, and what an adapter may have and this crate does not implement, by name.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join(ADAPTER_CONFIG_FILE);
        let text = read_text_file(&path).map_err(|err| {
            candle_core::Error::msg(format!(
                "cannot read {}: {err}\nhint: an adapter is a folder with {ADAPTER_CONFIG_FILE} and {ADAPTER_WEIGHTS_FILE}",
                path.display()
            ))
        })?;
        let of_file = |err: candle_core::Error| err.context(path.display().to_string());
        // Before the weights, which are others in other kinds of adapters.
        let fields = adapter_config::supported(&text).map_err(of_file)?;
        if dir.join(ADAPTER_WEIGHTS_FILE).symlink_metadata().is_err() {
            bail!(
                "{} has no {ADAPTER_WEIGHTS_FILE}\nhint: only safetensors weights are read; convert an adapter_model.bin file first: peft's \
                 save_pretrained writes the adapter that it has loaded so",
                dir.display()
            );
        }
        let weights = Checkpoint::open_file(dir, ADAPTER_WEIGHTS_FILE)?;
        let modules = modules(&weights)?;
        let config = adapter_config::from_fields(&fields, &modules).map_err(of_file)?;
        Ok(Self { config, weights })
    }

    /// Rank, scale and layers.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The configuration, with another seed of dropout.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.config.seed = seed;
        self
    }

    /// The adapter with another note of the model that it belongs to, for those who load it.
    pub fn with_base_model(mut self, base_model: Option<String>) -> Self {
        self.config.base_model = base_model;
        self
    }

    /// The file.
    pub fn weights(&self) -> &Checkpoint {
        &self.weights
    }

    /// The name in the file of matrix A or B of a layer.
    pub fn name_in_file(module: &str, matrix: &str) -> String {
        file_name(&format!("{module}.lora_{matrix}.weight"))
    }

    /// The layers that it adapts.
    ///
    /// # Errors
    /// A tensor of the file that is neither A nor B of a layer.
    pub fn modules(&self) -> Result<BTreeSet<String>> {
        modules(&self.weights)
    }

    /// An error if the file has more than the A and B of these layers.
    pub(crate) fn check_all_used(&self, used: &BTreeSet<&str>) -> Result<()> {
        let modules = self.modules()?;
        match modules
            .iter()
            .find(|module| !used.contains(module.as_str()))
        {
            None => Ok(()),
            Some(module) => bail!(
                "the adapter in {} is of the layer {module}, which the model does not have as a linear layer that can be adapted\n\
                 hint: it belongs to another model, or adapts its embedding or head",
                self.weights.dir().display()
            ),
        }
    }
}

/// The layers of an adapter's file.
fn modules(weights: &Checkpoint) -> Result<BTreeSet<String>> {
    let module = |file_name: &String| {
        let name = file_name.strip_prefix(FILE_PREFIX);
        match name.and_then(module_of) {
            Some(module) => Ok(module.to_string()),
            None => bail!(
                "the adapter in {} holds {file_name}; expected names as {FILE_PREFIX}model.layers.0.self_attn.q_proj{}",
                weights.dir().display(),
                MATRICES[0]
            ),
        }
    };
    weights.tensors().keys().map(module).collect()
}
