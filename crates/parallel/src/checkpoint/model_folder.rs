//! Which files of a folder are a model's.

use std::io::Result;
use std::path::Path;

use super::run_file::RUN_FILE;
use crate::files::{INDEX_FILE, WEIGHTS_FILE};
use crate::lora::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE};

/// Files beside the weights: configuration, tokenizer, chat template, model card, flags with which it was trained. Licences and notices have endings of all kinds.
const SIDECARS: [&str; 19] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "NOTICE",
    "USE_POLICY.md",
    "README.md",
    "candle_train.toml",
];

/// Folder of more chat templates.
const TEMPLATES: &str = "additional_chat_templates";

/// The names of what is in a folder.
#[derive(Debug, Default)]
pub(super) struct ModelFolder {
    /// Of weights, and the index of several; of adapters with their configuration.
    pub weights: Vec<String>,
    /// Of known files beside them, with `/` where they are in a folder.
    pub sidecars: Vec<String>,
    /// Of what is no part of a model.
    pub foreign: Vec<String>,
}

impl ModelFolder {
    /// Looks into `dir`.
    pub fn read(dir: &Path) -> Result<Self> {
        let mut folder = Self::default();
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name == TEMPLATES && entry.file_type()?.is_dir() {
                for entry in std::fs::read_dir(entry.path())? {
                    let path = entry?.path();
                    let file = path.file_name().unwrap_or_default().to_string_lossy();
                    folder.add(format!("{TEMPLATES}/{file}"), path.is_file());
                }
            } else {
                folder.add(name, entry.path().is_file());
            }
        }
        for names in [
            &mut folder.weights,
            &mut folder.sidecars,
            &mut folder.foreign,
        ] {
            names.sort();
        }
        Ok(folder)
    }

    fn add(&mut self, name: String, is_file: bool) {
        match is_file {
            true if name == RUN_FILE => {}
            true if is_weights(&name) => self.weights.push(name),
            true if is_sidecar(&name) => self.sidecars.push(name),
            _ => self.foreign.push(name),
        }
    }

    /// Whether a model could be loaded from it, or could once.
    pub fn is_model(&self) -> bool {
        !self.weights.is_empty() || self.sidecars.iter().any(|name| name == SIDECARS[0])
    }
}

/// The files of a model folder that are not weights, such as configuration, tokenizer, chat templates, licence and model card: names and
/// contents. Other files that lie there are left out.
///
/// # Errors
/// A folder or a file in it that cannot be read.
pub fn sidecar_files(dir: &Path) -> candle_core::Result<Vec<(String, Vec<u8>)>> {
    let fail = |path: &Path, err: std::io::Error| {
        candle_core::Error::msg(format!("cannot read {}: {err}", path.display()))
    };
    let folder = ModelFolder::read(dir).map_err(|err| fail(dir, err))?;
    let read = |name: String| {
        let path = dir.join(&name);
        let content = std::fs::read(&path).map_err(|err| fail(&path, err))?;
        Ok((name, content))
    };
    folder.sidecars.into_iter().map(read).collect()
}

/// Whether a file of this name belongs to a model beside its weights.
pub(super) fn is_sidecar(name: &str) -> bool {
    let template = name
        .strip_prefix(TEMPLATES)
        .and_then(|name| name.strip_prefix('/'));
    match template {
        Some(name) => name.ends_with(".jinja"),
        None => SIDECARS.contains(&name) || name.starts_with("LICENSE"),
    }
}

/// Whether a file of this name is part of a model's weights, whatever number of files it has.
fn is_weights(name: &str) -> bool {
    let is_number =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = name
        .strip_prefix("model-")
        .and_then(|name| name.strip_suffix(".safetensors"));
    let is_numbered = number
        .and_then(|number| number.split_once("-of-"))
        .is_some_and(|(index, count)| is_number(index) && is_number(count));
    let names = [
        WEIGHTS_FILE,
        INDEX_FILE,
        ADAPTER_WEIGHTS_FILE,
        ADAPTER_CONFIG_FILE,
    ];
    is_numbered || names.contains(&name)
}
