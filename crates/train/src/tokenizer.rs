//! Text to token ids and back: a `tokenizer.json` and the special tokens that the checkpoint's other files name.

use std::path::Path;

use candle_core::{Result, bail};

use crate::special_tokens::{SpecialTokens, read_special_tokens};

/// A checkpoint's tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    tokenizer: tokenizers::Tokenizer,
    special: SpecialTokens,
    max_id: u32,
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`.
    ///
    /// The end-of-sequence token is the `eos_token` of `tokenizer_config.json`, else of `special_tokens_map.json`, else
    /// the (first) `eos_token_id` of `config.json`, else of `generation_config.json`; likewise for the
    /// beginning-of-sequence token, which may be absent. Truncation and padding that the file asks for are not applied:
    /// training text is never cut.
    ///
    /// # Errors
    /// A file is missing or not what its name says, no end-of-sequence token is named, or the tokenizer does not have it.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join("tokenizer.json");
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) => bail!(
                "cannot read the tokenizer {path:?}: {e}\nhint: {}",
                missing_file_hint(dir)
            ),
        };
        let mut tokenizer = match tokenizers::Tokenizer::from_bytes(&bytes) {
            Ok(tokenizer) => tokenizer,
            Err(e) => bail!(
                "{path:?} is not a tokenizer in the format of the `tokenizers` library: {e}\nhint: the file may be damaged or belong to another program; fetch it again or write it with transformers' save_pretrained"
            ),
        };
        tokenizer.with_padding(None);
        if let Err(e) = tokenizer.with_truncation(None) {
            bail!("cannot turn off the truncation of {path:?}: {e}");
        }
        let special = read_special_tokens(dir, &tokenizer)?;
        Self::new(tokenizer, special)
    }

    pub(crate) fn new(tokenizer: tokenizers::Tokenizer, special: SpecialTokens) -> Result<Self> {
        match tokenizer.get_vocab(true).into_values().max() {
            Some(max_id) => Ok(Self {
                tokenizer,
                special,
                max_id,
            }),
            None => bail!("the tokenizer has an empty vocabulary"),
        }
    }

    /// Token ids of `text`. No special token is added; one that is spelled out in `text` becomes its id.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self.tokenizer.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => bail!("cannot encode a text of {} bytes: {e}", text.len()),
        }
    }

    /// Text of token `ids`, without special tokens.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match self.tokenizer.decode(ids, true) {
            Ok(text) => Ok(text),
            Err(e) => bail!("cannot decode {} token ids: {e}", ids.len()),
        }
    }

    /// Rows that an embedding needs for every token: the highest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.max_id as usize + 1
    }

    /// Id of the end-of-sequence token, which follows each document.
    pub fn eos_id(&self) -> u32 {
        self.special.eos_id
    }

    /// Id of the beginning-of-sequence token, if the checkpoint names one. It is not added to documents.
    pub fn bos_id(&self) -> Option<u32> {
        self.special.bos_id
    }

    /// Checks that a model with `model_vocab_size` embedding rows has one for each of `ids`.
    ///
    /// A tokenizer may well know more tokens than the model has rows (an added padding token, say), as long as no text uses
    /// them.
    ///
    /// # Errors
    /// An id is not below `model_vocab_size`.
    pub fn check_vocab(&self, ids: &[u32], model_vocab_size: usize) -> Result<()> {
        let Some(id) = ids.iter().find(|&&id| id as usize >= model_vocab_size) else {
            return Ok(());
        };
        bail!(
            "token id {id} ({:?}) is beyond the model's vocabulary: the tokenizer has {} tokens, the model {model_vocab_size}\nhint: tokenizer.json and config.json belong to different models",
            self.token(*id).unwrap_or_default(),
            self.vocab_size()
        )
    }

    /// Spelling of token `id`, if there is one.
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.tokenizer
    }
}

fn missing_file_hint(dir: &Path) -> String {
    let other = ["tokenizer.model", "vocab.json", "merges.txt", "tekken.json"]
        .into_iter()
        .find(|name| dir.join(name).exists());
    let found = other.map_or(String::new(), |name| format!("{name} is not read; "));
    format!(
        "{found}only tokenizer.json is supported (BPE, Unigram, WordPiece and WordLevel models); transformers writes it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )
}
