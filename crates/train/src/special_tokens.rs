//! Which tokens begin and end a sequence: spread over up to four JSON files of a checkpoint, read in a fixed order.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::Value;

/// Ids of the special tokens that training needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpecialTokens {
    pub(crate) eos_id: u32,
    pub(crate) bos_id: Option<u32>,
}

/// Files that spell the token out, in the order they are asked.
const SPELLING_FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];
/// Files that give its id.
const ID_FILES: [&str; 2] = ["config.json", "generation_config.json"];

/// Reads the special tokens of the checkpoint in `dir`.
pub(crate) fn read_special_tokens(
    dir: &Path,
    tokenizer: &tokenizers::Tokenizer,
) -> Result<SpecialTokens> {
    let files = Files::read(dir)?;
    let bos_id = files.find("bos", tokenizer)?;
    match files.find("eos", tokenizer)? {
        Some(eos_id) => Ok(SpecialTokens { eos_id, bos_id }),
        None => bail!(
            "no end-of-sequence token for the tokenizer in {dir:?}: {} have no `eos_token`, {} no `eos_token_id`\nhint: add \"eos_token\": \"...\" to tokenizer_config.json",
            SPELLING_FILES.join(" and "),
            ID_FILES.join(" and ")
        ),
    }
}

/// The files that exist, with their names.
struct Files {
    spelling: Vec<(&'static str, Value)>,
    id: Vec<(&'static str, Value)>,
}

impl Files {
    fn read(dir: &Path) -> Result<Self> {
        let read = |names: [&'static str; 2]| -> Result<Vec<_>> {
            let mut files = Vec::new();
            for name in names {
                if let Some(value) = read_json(&dir.join(name))? {
                    files.push((name, value));
                }
            }
            Ok(files)
        };
        Ok(Self {
            spelling: read(SPELLING_FILES)?,
            id: read(ID_FILES)?,
        })
    }

    /// The id of the token `kind` (eos or bos).
    fn find(&self, kind: &str, tokenizer: &tokenizers::Tokenizer) -> Result<Option<u32>> {
        for (name, file) in &self.spelling {
            let token = &file[format!("{kind}_token")];
            let token = token.as_str().or_else(|| token["content"].as_str());
            // Some tools write "" for a token that is not set.
            if let Some(token) = token.filter(|token| !token.is_empty()) {
                return match tokenizer.token_to_id(token) {
                    Some(id) => Ok(Some(id)),
                    None => bail!(
                        "{name} has {kind}_token {token:?}, which tokenizer.json does not have"
                    ),
                };
            }
        }
        for (name, file) in &self.id {
            let ids = &file[format!("{kind}_token_id")];
            if let Some(id) = ids.as_u64().or_else(|| ids[0].as_u64()) {
                return match u32::try_from(id) {
                    Ok(id) if tokenizer.id_to_token(id).is_some() => Ok(Some(id)),
                    _ => {
                        bail!("{name} has {kind}_token_id {id}, which tokenizer.json does not have")
                    }
                };
            }
        }
        Ok(None)
    }
}

/// `None` when there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => bail!("cannot read {path:?}: {e}"),
    };
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(e) => bail!("{path:?} is not valid JSON: {e}"),
    }
}
