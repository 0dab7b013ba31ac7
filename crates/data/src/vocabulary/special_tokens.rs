//! Which tokens begin and end a sequence: spread over up to four JSON files of a checkpoint, read in a fixed order.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::Value;

use super::tokenizer_config::{SPELLING_FILES, TokenizerConfig};
use crate::json_file::read_json;

/// Ids of the special tokens that training needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpecialTokens {
    pub(crate) eos_id: u32,
    pub(crate) bos_id: Option<u32>,
}

/// Files that give its id.
const ID_FILES: [&str; 2] = ["config.json", "generation_config.json"];

/// Reads the special tokens of the checkpoint in `dir`.
pub(crate) fn read_special_tokens(
    dir: &Path,
    config: &TokenizerConfig,
    tokenizer: &tokenizers::Tokenizer,
) -> Result<SpecialTokens> {
    let mut files = Vec::new();
    for name in ID_FILES {
        if let Some(value) = read_json(&dir.join(name))? {
            files.push((name, value));
        }
    }
    let bos_id = find("bos", (config, &files), tokenizer)?;
    match find("eos", (config, &files), tokenizer)? {
        Some(eos_id) => Ok(SpecialTokens { eos_id, bos_id }),
        None => bail!(
            "no end-of-sequence token for the tokenizer in {dir:?}: {} have no `eos_token`, {} no `eos_token_id`\nhint: add \"eos_token\": \"...\" to tokenizer_config.json",
            SPELLING_FILES.join(" and "),
            ID_FILES.join(" and ")
        ),
    }
}

/// The id of the token `kind` (eos or bos).
fn find(
    kind: &str,
    (config, files): (&TokenizerConfig, &[(&'static str, Value)]),
    tokenizer: &tokenizers::Tokenizer,
) -> Result<Option<u32>> {
    if let Some((file, token)) = config.spelling(&format!("{kind}_token")) {
        return match tokenizer.token_to_id(&token) {
            Some(id) => Ok(Some(id)),
            None => {
                bail!("{file} has {kind}_token {token:?}, which tokenizer.json does not have")
            }
        };
    }
    for (name, file) in files {
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
