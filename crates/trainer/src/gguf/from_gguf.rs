//! The tokenizer of a file.

use std::path::Path;

use candle_core::{Error, Result, bail};
use candle_parallel::gguf::{GgufMetadata, GgufValue};
use serde_json::{Map, Value, json};

use super::{SPACE, byte_level, kind, sentence_piece};
use crate::guarded::guarded;
use crate::special_tokens::SpecialTokens;
use crate::{ChatTemplate, Tokenizer};

/// The tokenizer that a file's metadata describe.
///
/// # Errors
/// A tokenizer of another kind than those of [`gguf_vocab`](super::gguf_vocab); what the file does not say.
pub fn tokenizer_from_gguf(metadata: &GgufMetadata) -> Result<Tokenizer> {
    let file = File(metadata);
    let (tokens, kinds) = (file.texts("tokens")?, file.kinds()?);
    if tokens.len() != kinds.len() {
        bail!(
            "the file has {} tokens and types of {}",
            tokens.len(),
            kinds.len()
        );
    }
    let Some(eos_id) = file.id("eos") else {
        bail!(
            "the file does not say which token ends a text: tokenizer.ggml.eos_token_id is missing"
        );
    };
    for name in ["bos", "eos"] {
        if let Some(id) = file.id(name).filter(|id| *id as usize >= tokens.len()) {
            bail!(
                "tokenizer.ggml.{name}_token_id is {id}, and the file has {} tokens",
                tokens.len()
            );
        }
    }
    let mut json = match file.text("model")?.as_str() {
        "gpt2" => file.byte_level()?,
        "llama" => file.sentence_piece(&tokens, &kinds)?,
        other => bail!("tokenizer.ggml.model is {other:?}; supported: gpt2, llama"),
    };
    // Rows without a token have no text.
    let vocab = tokens.iter().zip(&kinds).enumerate();
    let vocab = vocab.filter(|(_, (_, kind))| **kind != kind::UNUSED);
    let vocab = vocab.map(|(id, (token, _))| (token.clone(), json!(id)));
    json["model"]["vocab"] = Value::Object(vocab.collect::<Map<_, _>>());
    let added = tokens.iter().zip(&kinds).enumerate();
    let added = added.filter_map(|(id, (text, kind))| {
        let is_special = [kind::CONTROL, kind::UNKNOWN].contains(kind);
        let is_added = is_special || *kind == kind::USER_DEFINED;
        is_added.then(|| {
            json!({"id": id, "content": text, "special": is_special, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false})
        })
    });
    json["added_tokens"] = Value::Array(added.collect());
    json["version"] = json!("1.0");
    json["post_processor"] = file.around(&tokens);
    let bos_id = file.id("bos");
    let special = SpecialTokens { eos_id, bos_id };
    let made = guarded(|| {
        let tokenizer = json.to_string().parse::<tokenizers::Tokenizer>();
        Tokenizer::new(
            tokenizer.map_err(Error::msg)?,
            special,
            "the file's tokenizer".into(),
        )
    });
    made.map_err(|err| Error::msg(format!("the file's tokenizer cannot be made: {err}")))
}

/// The chat template of a file, which `path` is called in errors.
///
/// # Errors
/// It is no Jinja.
pub fn template_from_gguf(
    metadata: &GgufMetadata,
    path: &Path,
    tokenizer: &Tokenizer,
) -> Result<Option<ChatTemplate>> {
    let text = metadata.get("tokenizer.chat_template");
    let text = text.and_then(|text| text.to_string().ok());
    let template = text.map(|text| ChatTemplate::of_text(path, text, tokenizer));
    template.transpose()
}

struct File<'a>(&'a GgufMetadata);

impl File<'_> {
    fn find(&self, name: &str) -> Option<&GgufValue> {
        self.0.get(&format!("tokenizer.ggml.{name}"))
    }

    fn text(&self, name: &str) -> Result<String> {
        match self.find(name).map(GgufValue::to_string) {
            Some(Ok(text)) => Ok(text.clone()),
            _ => bail!("the file has no tokenizer.ggml.{name}, a text"),
        }
    }

    fn list(&self, name: &str) -> Result<&Vec<GgufValue>> {
        match self.find(name).map(GgufValue::to_vec) {
            Some(Ok(list)) => Ok(list),
            _ => bail!("the file has no tokenizer.ggml.{name}, a list"),
        }
    }

    fn texts(&self, name: &str) -> Result<Vec<String>> {
        self.list(name)?
            .iter()
            .map(|text| text.to_string().cloned())
            .collect()
    }

    fn kinds(&self) -> Result<Vec<i32>> {
        let kind = |kind: &GgufValue| {
            kind.to_i32()
                .or_else(|_| kind.to_u32().map(|kind| kind as i32))
        };
        self.list("token_type")?.iter().map(kind).collect()
    }

    fn id(&self, name: &str) -> Option<u32> {
        let id = self.find(&format!("{name}_token_id"))?;
        let signed = || id.to_i32().ok().and_then(|id| u32::try_from(id).ok());
        id.to_u32().ok().or_else(signed)
    }

    fn flag(&self, name: &str) -> bool {
        self.find(name)
            .is_some_and(|flag| flag.to_bool().unwrap_or(false))
    }

    fn byte_level(&self) -> Result<Value> {
        let pre = byte_level::named(&self.text("pre")?)?;
        Ok(json!({
            "model": {"type": "BPE", "merges": self.texts("merges")?, "ignore_merges": pre.ignores_merges()},
            "pre_tokenizer": pre.to_json(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        }))
    }

    fn sentence_piece(&self, tokens: &[String], kinds: &[i32]) -> Result<Value> {
        let scores: Vec<f32> = self
            .list("scores")?
            .iter()
            .map(GgufValue::to_f32)
            .collect::<Result<_>>()?;
        let ordinary = tokens.iter().zip(kinds).zip(scores);
        let ordinary = ordinary.filter(|((_, kind), _)| **kind == kind::NORMAL);
        let ordinary: Vec<(String, f32)> = ordinary
            .map(|((token, _), score)| (token.clone(), score))
            .collect();
        let merges = sentence_piece::merges(&ordinary);
        let merges: Vec<Value> = merges
            .iter()
            .map(|(left, right)| json!([left, right]))
            .collect();
        let unknown = self.id("unknown").and_then(|id| tokens.get(id as usize));
        let space = SPACE.to_string();
        let mut normalizers =
            vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": space})];
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": space}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        // It is there where nothing says otherwise.
        if self.find("add_space_prefix").is_none() || self.flag("add_space_prefix") {
            normalizers.insert(0, json!({"type": "Prepend", "prepend": space}));
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "model": {"type": "BPE", "merges": merges, "unk_token": unknown, "fuse_unk": true, "byte_fallback": true},
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "decoder": {"type": "Sequence", "decoders": decoders},
        }))
    }

    /// What puts the first and the last token around a text.
    fn around(&self, tokens: &[String]) -> Value {
        // It is added where nothing says otherwise, by tokenizers of SentencePiece.
        let is_sentence_piece = self.text("model").is_ok_and(|model| model == "llama");
        let is_added = |flag: &str, default: bool| match self.find(flag) {
            Some(_) => self.flag(flag),
            None => default,
        };
        let token = |name: &str, is_added: bool| {
            let id = self.id(name).filter(|_| is_added)?;
            Some((id, tokens.get(id as usize)?))
        };
        let first = token("bos", is_added("add_bos_token", is_sentence_piece));
        let last = token("eos", is_added("add_eos_token", false));
        let special =
            |(_, token): &(u32, &String)| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let single = first
            .iter()
            .map(special)
            .chain([text])
            .chain(last.iter().map(special));
        let single: Vec<Value> = single.collect();
        let named = first.iter().chain(&last);
        let named = named.map(|(id, token)| {
            (
                (*token).clone(),
                json!({"id": token, "ids": [id], "tokens": [token]}),
            )
        });
        let mut pair = single.clone();
        pair.push(json!({"Sequence": {"id": "B", "type_id": 1}}));
        json!({
            "type": "TemplateProcessing", "single": single, "pair": pair,
            "special_tokens": named.collect::<Map<_, _>>()
        })
    }
}
