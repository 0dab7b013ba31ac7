//! Text to token ids and back: a `tokenizer.json` and what the checkpoint's other files say of its tokens.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::read_file;
use rayon::prelude::*;
use tokenizers::Encoding;

use super::line_borders::{Borders, PART_BYTES, borders_of};
use super::special_tokens::{SpecialTokens, read_special_tokens};
use super::text_growth::check_growth;
use super::tokenizer_config::TokenizerConfig;
use crate::guarded::guarded;

/// A checkpoint's tokenizer.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    tokenizer: tokenizers::Tokenizer,
    /// What it is called in errors: the file that it is from.
    name: String,
    special: SpecialTokens,
    /// Spellings of special tokens, by name.
    named: BTreeMap<String, String>,
    max_id: u32,
    /// Where long texts may be cut, to be encoded in parts.
    borders: Option<Borders>,
    num_encoded_bytes: Arc<AtomicU64>,
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`, and from `tokenizer_config.json` tokens that it lacks (`added_tokens_decoder`, special tokens) and
    /// whether special tokens that a text spells out are split like other text (`split_special_tokens`).
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
        let bytes = match read_file(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::NotFound => bail!(
                "cannot read the tokenizer {path:?}: {e}\nhint: {}",
                missing_file_hint(dir)
            ),
            Err(e) => bail!("cannot read the tokenizer {path:?}: {e}"),
        };
        let config = TokenizerConfig::read(dir)?;
        let not_a_tokenizer = |why: &dyn std::fmt::Display| {
            Error::msg(format!(
                "{path:?} is not a tokenizer in the format of the `tokenizers` library: {why}\nhint: the file may be damaged or belong to another program; fetch it again or write it with transformers' save_pretrained"
            ))
        };
        let read = || {
            check_growth(&bytes).map_err(|e| not_a_tokenizer(&e))?;
            let tokenizer = tokenizers::Tokenizer::from_bytes(&bytes);
            let mut tokenizer = tokenizer.map_err(|e| not_a_tokenizer(&e))?;
            tokenizer.with_padding(None);
            if let Err(e) = tokenizer.with_truncation(None) {
                bail!("cannot turn off the truncation of {path:?}: {e}");
            }
            config.apply(&mut tokenizer)?;
            let special = read_special_tokens(dir, &config, &tokenizer)?;
            for contradiction in config.contradictions(&tokenizer) {
                tracing::warn!("{contradiction}");
            }
            let mut read = Self::new(tokenizer, special, format!("{path:?}"))?;
            read.named.extend(config.named());
            Ok(read)
        };
        guarded(|| Ok(read())).unwrap_or_else(|panic| Err(not_a_tokenizer(&panic)))
    }

    /// A tokenizer that is called `name` in errors.
    pub(crate) fn new(
        tokenizer: tokenizers::Tokenizer,
        special: SpecialTokens,
        name: String,
    ) -> Result<Self> {
        let Some(max_id) = tokenizer.get_vocab(true).into_values().max() else {
            bail!("the tokenizer has an empty vocabulary")
        };
        let ids = [
            ("bos_token", special.bos_id),
            ("eos_token", Some(special.eos_id)),
        ];
        let named = ids
            .into_iter()
            .filter_map(|(name, id)| Some((name.to_string(), tokenizer.id_to_token(id?)?)));
        Ok(Self {
            named: named.collect(),
            borders: borders_of(&tokenizer),
            num_encoded_bytes: Arc::default(),
            tokenizer,
            name,
            special,
            max_id,
        })
    }

    /// Token ids of `text` without those that the tokenizer adds to texts, as transformers gives them with
    /// `add_special_tokens=False`. A special token that is spelled out in `text` becomes its id, unless the checkpoint asks to split them.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    /// Token ids of `text` with the special tokens that the tokenizer's post-processor adds, such as Llama's at the beginning.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Token ids of a text that a model is to continue: as [`Self::encode_with_special_tokens`], without an end.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode_with(text, true)?;
        let eos = Some(&self.eos_id());
        if ids.last() == eos && self.encode(text)?.last() != eos {
            ids.pop();
        }
        Ok(ids)
    }

    fn encode_with(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>> {
        if let Some(borders) = &self.borders
            && text.len() >= 2 * PART_BYTES
            && let Some([before, after]) = self.added_ids(special_tokens)?
        {
            let parts = borders.parts(text, PART_BYTES).into_par_iter();
            let parts = parts.map(|part| {
                let ids = self.encode_whole(part, false)?;
                let num_bytes = part.len() as u64;
                self.num_encoded_bytes
                    .fetch_add(num_bytes, Ordering::Relaxed);
                Ok(ids)
            });
            let parts: Vec<Vec<u32>> = parts.collect::<Result<_>>()?;
            return Ok([before, parts.concat(), after].concat());
        }
        self.encode_whole(text, special_tokens)
    }

    /// Counts the bytes of long texts, which are encoded in parts, as these are done: to show how far a program is that encodes one.
    pub fn num_encoded_bytes(&self) -> Arc<AtomicU64> {
        self.num_encoded_bytes.clone()
    }

    fn encode_whole(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>> {
        let encode = || self.tokenizer.encode_fast(text, special_tokens);
        Ok(self.encoding(text, encode)?.get_ids().to_vec())
    }

    /// What `encode` makes of a text.
    fn encoding(
        &self,
        text: &str,
        encode: impl FnOnce() -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding> {
        let encoding = guarded(|| encode().map_err(Error::msg));
        encoding.map_err(|e| {
            let (name, num_bytes) = (&self.name, text.len());
            Error::msg(format!(
                "{name} cannot encode a text of {num_bytes} bytes: {e}"
            ))
        })
    }

    /// The ids that the post-processor puts before and after those of a text; `None` if it does something else.
    fn added_ids(&self, special_tokens: bool) -> Result<Option<[Vec<u32>; 2]>> {
        let alone = self.encode_whole("a", false)?;
        let with = self.encode_whole("a", special_tokens)?;
        let place = with
            .windows(alone.len().max(1))
            .position(|ids| ids == alone);
        Ok(place.map(|place| {
            let end = place + alone.len();
            [with[..place].to_vec(), with[end..].to_vec()]
        }))
    }

    /// The ids that the post-processor puts before and after those of a text.
    ///
    /// # Errors
    /// It does something else.
    pub(crate) fn added_around(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        match self.added_ids(true)? {
            Some([before, after]) => Ok((before, after)),
            None => bail!(
                "the tokenizer's post-processor changes the tokens of a text instead of putting some around them"
            ),
        }
    }

    /// Token ids of `text`, and which of them have anything of `spans`, bytes of it. Between the first and the last token of a span
    /// all count.
    ///
    /// # Errors
    /// The tokenizer cannot encode the text.
    pub(crate) fn encode_spans(
        &self,
        text: &str,
        special_tokens: bool,
        spans: &[Range<usize>],
    ) -> Result<(Vec<u32>, Vec<bool>)> {
        let encoding = self.encoding(text, || self.tokenizer.encode(text, special_tokens))?;
        let offsets = encoding.get_offsets();
        let mut in_span = vec![false; offsets.len()];
        // The first and the last token of each span, in one pass.
        let mut tokens: Vec<Option<(usize, usize)>> = vec![None; spans.len()];
        for (token, &(begin, end)) in offsets.iter().enumerate() {
            let mut span = spans.partition_point(|span| span.end <= begin);
            while spans.get(span).is_some_and(|span| span.start < end) {
                let (first, _) = tokens[span].unwrap_or((token, token));
                tokens[span] = Some((first, token));
                span += 1;
            }
        }
        for (first, last) in tokens.into_iter().flatten() {
            in_span[first..=last].fill(true);
        }
        Ok((encoding.get_ids().to_vec(), in_span))
    }

    /// Text of token `ids`, without special tokens.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, true)
    }

    /// Text of token `ids`, special tokens included.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub fn decode_with_special_tokens(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, false)
    }

    fn decode_with(&self, ids: &[u32], skips_special: bool) -> Result<String> {
        let decode = || {
            self.tokenizer
                .decode(ids, skips_special)
                .map_err(Error::msg)
        };
        guarded(decode).map_err(|e| {
            let (name, num_ids) = (&self.name, ids.len());
            Error::msg(format!("{name} cannot decode {num_ids} token ids: {e}"))
        })
    }

    /// Rows that an embedding needs for every token: the highest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.max_id as usize + 1
    }

    /// Id of the end-of-sequence token, which follows each document.
    pub fn eos_id(&self) -> u32 {
        self.special.eos_id
    }

    /// Id of the beginning-of-sequence token, if the checkpoint names one.
    pub fn bos_id(&self) -> Option<u32> {
        self.special.bos_id
    }

    /// Spellings of the special tokens that have names, such as `bos_token`: what chat templates know.
    pub fn named_special_tokens(&self) -> &BTreeMap<String, String> {
        &self.named
    }

    /// Spellings of all special tokens, sorted.
    pub fn special_tokens(&self) -> Vec<String> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let special = added.into_values().filter(|token| token.special);
        let mut special: Vec<String> = special.map(|token| token.content).collect();
        special.sort();
        special
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

    /// Id of the token that is spelled so, if there is one.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// What decides the ids of texts.
    ///
    /// # Errors
    /// The tokenizer cannot be written.
    pub(crate) fn identity(&self) -> Result<String> {
        let splits = self.tokenizer.get_encode_special_tokens();
        match self.tokenizer.to_string(false) {
            Ok(tokenizer) => Ok(format!("{tokenizer} {splits} {:?}", self.special)),
            Err(err) => bail!("cannot write the tokenizer: {err}"),
        }
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
