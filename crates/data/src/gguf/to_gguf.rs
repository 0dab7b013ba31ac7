//! What a file says of a tokenizer, as llama.cpp's own conversion does.

use std::collections::HashMap;

use candle_core::{Error, Result, bail};
use candle_parallel::gguf::{GgufMetadata, GgufValue};
use serde_json::Value;

use super::{SPACE, byte_level, kind, sentence_piece};
use crate::chat::ChatTemplate;
use crate::guarded::guarded;
use crate::vocabulary::Tokenizer;
use crate::words::counted;

/// Names of special tokens: that of a file, in llama.cpp's spelling, and that of transformers.
const SPECIAL: [(&str, &str); 4] = [
    ("unknown", "unk_token"),
    ("padding", "pad_token"),
    ("seperator", "sep_token"),
    ("mask", "mask_token"),
];

/// A tokenizer as a file has it.
pub struct GgufVocab {
    /// What the file says.
    pub metadata: GgufMetadata,
    /// What llama.cpp makes otherwise of texts, in lines.
    pub differences: Vec<String>,
}

/// What a file of a model with `num_rows` rows in its embedding says of its tokenizer. `eos_ids` are tokens that end a text beside the
/// tokenizer's own.
///
/// # Errors
/// A tokenizer that llama.cpp does not have, with what is different.
pub fn gguf_vocab(
    tokenizer: &Tokenizer,
    num_rows: usize,
    template: Option<&ChatTemplate>,
    eos_ids: &[u32],
) -> Result<GgufVocab> {
    let json = tokenizer.inner().to_string(false);
    let json = json.map_err(|err| Error::msg(format!("cannot write the tokenizer: {err}")))?;
    let json: Value = serde_json::from_str(&json).map_err(Error::wrap)?;
    let model = &json["model"];
    if model["type"] != "BPE" {
        bail!(
            "tokenizer.json has a model of type {}; llama.cpp's tokenizers that this program writes are of type \"BPE\"",
            model["type"]
        );
    }
    for name in ["continuing_subword_prefix", "end_of_word_suffix", "dropout"] {
        let value = &model[name];
        if !value.is_null() && *value != "" && *value != 0.0 {
            bail!("tokenizer.json has {name} {value}, which llama.cpp's tokenizers do not have");
        }
    }
    let mut vocab = GgufVocab {
        metadata: GgufMetadata::default(),
        differences: Vec::new(),
    };
    let pre_tokenizers = steps(&json["pre_tokenizer"], "pretokenizers");
    let is_byte_level = |step: &Value| step["type"] == "ByteLevel";
    let has_bytes = pre_tokenizers.iter().any(is_byte_level);
    let mut tokens = Tokens::of(&json, num_rows, has_bytes, &mut vocab.differences);
    match has_bytes {
        true => vocab.set_byte_level(tokenizer, &json, &pre_tokenizers)?,
        false => vocab.set_sentence_piece(&json, &pre_tokenizers, &mut tokens)?,
    }
    tokens.check()?;
    let texts = tokens
        .texts
        .iter()
        .map(|text| GgufValue::String(text.clone()));
    let kinds = tokens.kinds.iter().map(|kind| GgufValue::I32(*kind));
    vocab.set("tokens", GgufValue::Array(texts.collect()));
    vocab.set("token_type", GgufValue::Array(kinds.collect()));
    if has_bytes {
        let merges = merges(model)?.into_iter();
        let merges = merges.map(|(left, right)| GgufValue::String(format!("{left} {right}")));
        vocab.set("merges", GgufValue::Array(merges.collect()));
    }
    if tokenizer.inner().get_encode_special_tokens() {
        vocab.differences.push(
            "tokenizer_config.json has split_special_tokens: llama.cpp takes special tokens that a text spells out as such, where its caller asks for that"
                .to_string(),
        );
    }
    vocab.set_special(tokenizer, num_rows, template, eos_ids)?;
    if let Some(template) = template {
        let text = template.text_of_template();
        vocab.metadata.set_text("tokenizer.chat_template", text);
    }
    Ok(vocab)
}

impl GgufVocab {
    fn set(&mut self, name: &str, value: GgufValue) {
        self.metadata.set(format!("tokenizer.ggml.{name}"), value);
    }

    fn set_byte_level(
        &mut self,
        tokenizer: &Tokenizer,
        json: &Value,
        pre_tokenizers: &[Value],
    ) -> Result<()> {
        let normalizers = steps(&json["normalizer"], "normalizers");
        // llama.cpp takes texts as they are, which most are in this form already.
        if let Some(other) = normalizers.iter().find(|step| step["type"] != "NFC") {
            bail!(
                "llama.cpp's tokenizer of this kind does nothing to texts before it splits them, and tokenizer.json has {other}"
            );
        }
        let ignores_merges = json["model"]["ignore_merges"] == true;
        let matters = || has_unreachable(tokenizer, json);
        let pre = byte_level::find(pre_tokenizers, ignores_merges, matters)?;
        self.differences.extend(pre.difference());
        let tokens = json["model"]["vocab"].as_object().into_iter().flatten();
        let num_bytes = tokens
            .filter(|(text, _)| text.chars().nth(1).is_none())
            .count();
        let missing = 256usize.saturating_sub(num_bytes);
        if missing > 0 {
            self.differences.push(format!(
                "the vocabulary has no token for {}: of texts with these llama.cpp may merge what is beside them otherwise",
                counted(missing, "byte")
            ));
        }
        self.set("model", GgufValue::String("gpt2".to_string()));
        self.set("pre", GgufValue::String(pre.name.to_string()));
        Ok(())
    }

    fn set_sentence_piece(
        &mut self,
        json: &Value,
        pre_tokenizers: &[Value],
        tokens: &mut Tokens,
    ) -> Result<()> {
        let model = &json["model"];
        let spaces =
            sentence_piece::spaces(&steps(&json["normalizer"], "normalizers"), pre_tokenizers)?;
        if model["byte_fallback"] != true {
            bail!(
                "tokenizer.json has no byte_fallback: llama.cpp's tokenizer of this kind writes characters that no token has as bytes, <0x00> to <0xFF>"
            );
        }
        let merges = merges(model)?;
        let ordinary = tokens.ordinary();
        let (scores, num_other) = sentence_piece::scores(&ordinary, &merges);
        if num_other > 0 {
            self.differences.push(format!(
                "llama.cpp merges whatever makes a token, and tokenizer.json has not all of these merges ({} are missing): some texts have other \
                 tokens there",
                num_other
            ));
        }
        let is_normalized = |token: &Value| token["normalized"] == true && token["special"] != true;
        let mut added = json["added_tokens"].as_array().into_iter().flatten();
        if let Some(token) = added.find(|token| spaces.before_text && is_normalized(token)) {
            self.differences.push(format!(
                "llama.cpp puts a space before the text that follows an added token such as {}, and tokenizer.json does not",
                token["content"]
            ));
        }
        if spaces.first_only {
            self.differences.push(
                "llama.cpp puts a space before the text that follows a special token, and tokenizer.json only before a whole text: other tokens in \
                 conversations"
                    .to_string(),
            );
        }
        for (text, kind) in tokens.texts.iter().zip(&mut tokens.kinds) {
            if *kind == kind::NORMAL && is_byte(text) {
                *kind = kind::BYTE;
            }
        }
        let bytes = tokens.kinds.iter().filter(|kind| **kind == kind::BYTE);
        if bytes.count() < 256 {
            bail!(
                "tokenizer.json has not all tokens of bytes, <0x00> to <0xFF>, which llama.cpp's tokenizer of this kind needs"
            );
        }
        self.set("model", GgufValue::String("llama".to_string()));
        self.set("pre", GgufValue::String("default".to_string()));
        let scores = scores.into_iter().map(GgufValue::F32).collect();
        self.set("scores", GgufValue::Array(scores));
        self.set("add_space_prefix", GgufValue::Bool(spaces.before_text));
        Ok(())
    }

    fn set_special(
        &mut self,
        tokenizer: &Tokenizer,
        num_rows: usize,
        template: Option<&ChatTemplate>,
        eos_ids: &[u32],
    ) -> Result<()> {
        let eos_id = tokenizer.eos_id();
        let (before, after) = tokenizer.added_around()?;
        let bos_id = tokenizer.bos_id().or_else(|| before.first().copied());
        let adds_bos = before.first().is_some_and(|first| Some(*first) == bos_id);
        let adds_eos = after.last() == Some(&eos_id);
        let more = [
            &before[usize::from(adds_bos)..],
            &after[..after.len() - usize::from(adds_eos)],
        ];
        if more.iter().any(|ids| !ids.is_empty()) {
            self.differences.push(format!(
                "tokenizer.json puts tokens around texts that llama.cpp does not: {before:?} before, {after:?} after"
            ));
        }
        let end_of_turn = template.and_then(|template| template.fit(tokenizer).end_of_turn_id);
        let ends = end_of_turn.into_iter().chain(eos_ids.iter().copied());
        let eot_id = ends.into_iter().find(|id| *id != eos_id);
        let named = |name: &str| {
            let spelling = tokenizer.named_special_tokens().get(name);
            spelling.and_then(|spelling| tokenizer.token_id(spelling))
        };
        let ids = [("bos", bos_id), ("eos", Some(eos_id)), ("eot", eot_id)];
        let others = SPECIAL.map(|(name, of_config)| (name, named(of_config)));
        for (name, id) in ids.into_iter().chain(others) {
            let Some(id) = id else { continue };
            if (id as usize) < num_rows {
                self.metadata
                    .set_count(format!("tokenizer.ggml.{name}_token_id"), id as usize);
            } else if ["bos", "eos"].contains(&name) {
                bail!(
                    "the tokenizer's {name} token has the id {id}, and the model's embedding {num_rows} rows\nhint: tokenizer.json and config.json belong \
                     to different models"
                );
            }
        }
        self.set("add_bos_token", GgufValue::Bool(adds_bos));
        self.set("add_eos_token", GgufValue::Bool(adds_eos));
        Ok(())
    }
}

/// The tokens of a file, one a row of the embedding.
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<i32>,
}

impl Tokens {
    fn of(json: &Value, num_rows: usize, has_bytes: bool, differences: &mut Vec<String>) -> Self {
        let mut tokens = Self {
            texts: (0..num_rows).map(|row| format!("[PAD{row}]")).collect(),
            kinds: vec![kind::UNUSED; num_rows],
        };
        let mut beyond = Vec::new();
        for (text, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
            tokens.set(id, text.clone(), kind::NORMAL, &mut beyond);
        }
        let mut with_spaces = Vec::new();
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let text = token["content"].as_str().unwrap_or_default();
            if token["lstrip"] == true || token["rstrip"] == true || token["single_word"] == true {
                with_spaces.push(text);
            }
            match token["special"] == true || looks_special(text) {
                true => tokens.set(&token["id"], text.to_string(), kind::CONTROL, &mut beyond),
                // It is looked for in texts before they have any, so merges make it.
                false if !has_bytes && token["normalized"] == false && text.contains(SPACE) => {
                    tokens.set(&token["id"], text.to_string(), kind::NORMAL, &mut beyond);
                }
                // As texts have it.
                false => {
                    let text = match has_bytes {
                        true => text.to_string(),
                        false => text.replace(SPACE, " "),
                    };
                    tokens.set(&token["id"], text, kind::USER_DEFINED, &mut beyond);
                }
            }
        }
        if !beyond.is_empty() {
            differences.push(format!(
                "{} of the tokenizer left out, for which the embedding has no rows: {}",
                counted(beyond.len(), "token"),
                crate::words::few(&beyond)
            ));
        }
        if !with_spaces.is_empty() {
            let with_spaces: Vec<String> = with_spaces.into_iter().map(str::to_string).collect();
            differences.push(format!(
                "llama.cpp leaves the spaces beside these tokens, or takes them in the middle of words, where tokenizer.json does not: {}",
                crate::words::few(&with_spaces)
            ));
        }
        tokens
    }

    fn set(&mut self, id: &Value, text: String, kind: i32, beyond: &mut Vec<String>) {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        let place = id.and_then(|id| Some((self.texts.get_mut(id)?, self.kinds.get_mut(id)?)));
        match place {
            Some((own, own_kind)) => (*own, *own_kind) = (text, kind),
            None => beyond.push(text),
        }
    }

    /// An error unless llama.cpp can tell all of them apart.
    fn check(&self) -> Result<()> {
        let mut rows: HashMap<&str, usize> = HashMap::new();
        for (row, text) in self.texts.iter().enumerate() {
            if text.contains('\0') {
                bail!(
                    "token {row} of the tokenizer is {text:?}, and llama.cpp ends texts of tokens at a zero"
                );
            }
            if let Some(other) = rows.insert(text, row) {
                bail!(
                    "tokens {other} and {row} are both {text:?}, which llama.cpp cannot tell apart"
                );
            }
        }
        Ok(())
    }

    /// The texts of what merges can make.
    fn ordinary(&self) -> Vec<Option<String>> {
        let tokens = self.texts.iter().zip(&self.kinds);
        let tokens = tokens
            .map(|(text, kind)| (*kind == kind::NORMAL && !is_byte(text)).then(|| text.clone()));
        tokens.collect()
    }
}

/// The parts of a sequence, or the one there is.
fn steps(step: &Value, parts: &str) -> Vec<Value> {
    match (step.is_null(), step[parts].as_array()) {
        (true, _) => Vec::new(),
        (false, Some(all)) => all.iter().flat_map(|step| steps(step, parts)).collect(),
        (false, None) => vec![step.clone()],
    }
}

/// The merges of a model in either spelling: `"a b"` and `["a", "b"]`.
fn merges(model: &Value) -> Result<Vec<(String, String)>> {
    let merge = |merge: &Value| {
        let pair = match merge {
            Value::String(text) => text
                .split_once(' ')
                .map(|(a, b)| (a.to_string(), b.to_string())),
            merge => {
                let part = |index: usize| merge[index].as_str().map(str::to_string);
                part(0).zip(part(1))
            }
        };
        pair.ok_or_else(|| {
            Error::msg(format!(
                "tokenizer.json has the merge {merge}; expected two tokens"
            ))
        })
    };
    let all = model["merges"].as_array().into_iter().flatten();
    all.map(merge).collect()
}

/// Whether a token is there that merges do not make of its own text.
fn has_unreachable(tokenizer: &Tokenizer, json: &Value) -> bool {
    let mut plain = json.clone();
    plain["model"]["ignore_merges"] = Value::Bool(false);
    for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        plain[part] = Value::Null;
    }
    plain["added_tokens"] = Value::Array(Vec::new());
    let Ok(plain) = plain.to_string().parse::<tokenizers::Tokenizer>() else {
        return true;
    };
    let added = tokenizer.inner().get_added_tokens_decoder();
    let vocab = json["model"]["vocab"].as_object();
    vocab.into_iter().flatten().any(|(text, id)| {
        let id = id.as_u64().unwrap_or_default() as u32;
        let ids = guarded(|| plain.encode_fast(text.as_str(), false).map_err(Error::msg));
        !added.contains_key(&id) && !ids.is_ok_and(|ids| ids.get_ids() == [id])
    })
}

/// Whether a token that is not marked as special is one all the same, as in some families' files.
fn looks_special(text: &str) -> bool {
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || text.starts_with("<|") && text.ends_with("|>")
        || text.starts_with("<\u{ff5c}") && text.ends_with("\u{ff5c}>")
        || text.starts_with("<unused") && text.ends_with('>')
}

/// Whether a token is that of a byte, as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text
        .strip_prefix("<0x")
        .and_then(|text| text.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}
