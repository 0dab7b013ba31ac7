//! What `tokenizer_config.json` says of the tokens, beyond `tokenizer.json`: applied as transformers does.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Result, bail};
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use crate::json_file::read_json;

/// Special tokens with names of their own, in the order in which transformers adds them.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Files that spell special tokens out, in the order they are asked.
pub(crate) const SPELLING_FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// The configuration of a checkpoint's tokenizer.
#[derive(Default)]
pub(crate) struct TokenizerConfig {
    /// The files that exist, with their names.
    pub files: Vec<(&'static str, Value)>,
}

impl TokenizerConfig {
    pub fn read(dir: &Path) -> Result<Self> {
        let mut files = Vec::new();
        for name in SPELLING_FILES {
            if let Some(value) = read_json(&dir.join(name))? {
                files.push((name, value));
            }
        }
        Ok(Self { files })
    }

    /// Adds the tokens that `tokenizer.json` lacks, gives those that differ their properties, and sets whether special tokens that
    /// texts spell out are split like other text.
    ///
    /// `add_bos_token` and `add_eos_token` change nothing beside a `tokenizer.json`, whose post-processor decides, as in transformers 5;
    /// where they say otherwise a warning tells.
    pub fn apply(&self, tokenizer: &mut Tokenizer) -> Result<()> {
        let empty = Value::Null;
        let find = |name: &str| self.files.iter().find(|(file, _)| *file == name);
        let config = find(SPELLING_FILES[0]).map_or(&empty, |(_, config)| config);
        let listed = added_tokens_decoder(config)?;
        let unknown = |content: &str, tokenizer: &Tokenizer| {
            let known = tokenizer.get_added_tokens_decoder();
            !known.values().any(|token| token.content == content)
        };
        let mut tokens = listed.clone();
        for token in self.special_tokens(config, &listed) {
            let is_new = unknown(&token.content, tokenizer) && !tokens.contains(&token);
            let has_id = tokenizer.token_to_id(&token.content).is_some();
            if is_new && (has_id || !self.is_required(&token.content)) {
                tokens.push(token);
            }
        }
        if let Err(err) = tokenizer.add_tokens(tokens) {
            bail!("cannot add the tokens of {}: {err}", SPELLING_FILES[0]);
        }
        let splits = config["split_special_tokens"].as_bool().unwrap_or(false);
        tokenizer.set_encode_special_tokens(splits);
        Ok(())
    }

    /// Tokens of which tokenizer.json must know: training would give a new one a row that the model does not have.
    fn is_required(&self, content: &str) -> bool {
        ["bos_token", "eos_token"].iter().any(|name| {
            self.spelling(name)
                .is_some_and(|(_, token)| token == content)
        })
    }

    /// The spelling of a special token such as `bos_token`, and the file that has it.
    pub fn spelling(&self, name: &str) -> Option<(&'static str, String)> {
        self.files.iter().find_map(|(file, content)| {
            let token = content_of(&content[name])?;
            // Some tools write "" for a token that is not set.
            (!token.is_empty()).then(|| (*file, token.to_string()))
        })
    }

    /// The spellings of all special tokens with names.
    pub fn named(&self) -> BTreeMap<String, String> {
        let named = NAMED.iter();
        let named = named.filter_map(|name| Some((name.to_string(), self.spelling(name)?.1)));
        named.collect()
    }

    fn special_tokens(&self, config: &Value, listed: &[AddedToken]) -> Vec<AddedToken> {
        let named = NAMED.iter().filter_map(|name| Some(self.spelling(name)?.1));
        let extra = ["extra_special_tokens", "additional_special_tokens"];
        let extra = extra.iter().find_map(|name| config[*name].as_array());
        let extra = extra
            .into_iter()
            .flatten()
            .filter_map(content_of)
            .map(str::to_string);
        let token = |content: String| match listed.iter().find(|token| token.content == content) {
            Some(token) => token.clone(),
            None => AddedToken::from(content, true),
        };
        named.chain(extra).map(token).collect()
    }

    /// What of `add_bos_token` and `add_eos_token` differs from what the tokenizer does, in words.
    pub fn contradictions(&self, tokenizer: &Tokenizer) -> Vec<String> {
        let Ok(with) = tokenizer.encode_fast("a", true) else {
            return Vec::new();
        };
        let Ok(without) = tokenizer.encode_fast("a", false) else {
            return Vec::new();
        };
        let ids = with.get_ids();
        let adds = [
            ("add_bos_token", ids.first() != without.get_ids().first()),
            ("add_eos_token", ids.last() != without.get_ids().last()),
        ];
        let config = self
            .files
            .iter()
            .find(|(file, _)| *file == SPELLING_FILES[0]);
        let says = |name: &str| config.and_then(|(_, config)| config[name].as_bool());
        let differing = adds
            .iter()
            .filter(|(name, does)| says(name).is_some_and(|said| said != *does));
        differing
            .map(|(name, does)| {
                format!(
                    "{} has {name} {}, and tokenizer.json {} such a token to texts; as in transformers 5 the latter counts",
                    SPELLING_FILES[0],
                    !does,
                    if *does { "adds" } else { "does not add" }
                )
            })
            .collect()
    }
}

/// A token as a text or as an object.
fn content_of(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// The tokens of `added_tokens_decoder`, in the order of their ids.
fn added_tokens_decoder(config: &Value) -> Result<Vec<AddedToken>> {
    let mut tokens = BTreeMap::new();
    for (id, token) in config["added_tokens_decoder"]
        .as_object()
        .into_iter()
        .flatten()
    {
        let flag = |name: &str, default: bool| token[name].as_bool().unwrap_or(default);
        let (Ok(id), Some(content)) = (id.parse::<u32>(), token["content"].as_str()) else {
            bail!(
                "added_tokens_decoder of {} has {id:?}: {token}, expected an id and an object with \"content\"",
                SPELLING_FILES[0]
            );
        };
        let special = flag("special", false);
        let added = AddedToken::from(content, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special));
        tokens.insert(id, added);
    }
    Ok(tokens.into_values().collect())
}
