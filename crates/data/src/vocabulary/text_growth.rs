//! How much longer a tokenizer may make a text before it is split, or tokens when they become text.

use base64::prelude::{BASE64_STANDARD_NO_PAD, Engine};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{
    Decoder, DecoderWrapper, NormalizedString, Normalizer, NormalizerWrapper, PostProcessor,
    PostProcessorWrapper,
};

/// Bytes that may stand in the place of one, or be put before a text. Files of known models write up to three.
const MOST_PER_BYTE: usize = 256;

/// Bytes that may stand in the place of one pattern, however long that is.
const MOST_WRITTEN: usize = 1 << 16;

/// Tokens that may be put around those of a text.
const MOST_ADDED: usize = 1 << 16;

/// Bytes in all to which changes are tried.
const MOST_TRIED: usize = 64 << 20;

/// The parts of a `tokenizer.json` that make texts longer.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Parts {
    normalizer: Value,
    decoder: Value,
    post_processor: Value,
}

/// Checks what a `tokenizer.json` asks for before the library makes a tokenizer of it, which normalizes its added tokens.
///
/// # Errors
/// A part that is none of the library's, that replaces nothing, or that writes more than the limits above.
pub(crate) fn check_growth(file: &[u8]) -> Result<(), String> {
    let parts: Parts = serde_json::from_slice(file).map_err(|err| err.to_string())?;
    check_precompiled(&parts.normalizer)?;
    let normalizer: Option<NormalizerWrapper> = part(parts.normalizer)?;
    let normalizers = flattened(normalizer.as_slice(), |it| match it {
        NormalizerWrapper::Sequence(parts) => Some(parts.as_ref()),
        _ => None,
    });
    check_changes(&normalizers, |normalizer, text| {
        let mut text = NormalizedString::from(text);
        normalizer
            .normalize(&mut text)
            .map_err(|err| err.to_string())?;
        Ok(text.get().to_string())
    })?;
    let decoder: Option<DecoderWrapper> = part(parts.decoder)?;
    let decoders = flattened(decoder.as_slice(), |it| match it {
        DecoderWrapper::Sequence(parts) => Some(parts.get_decoders()),
        _ => None,
    });
    check_changes(&decoders, |decoder, text| {
        let tokens = decoder
            .decode_chain(vec![text])
            .map_err(|err| err.to_string())?;
        Ok(tokens.concat())
    })?;
    check_template(&parts.post_processor)?;
    let post_processor: Option<PostProcessorWrapper> = part(parts.post_processor)?;
    let num_added = post_processor.map_or(0, |it| it.added_tokens(false));
    if num_added > MOST_ADDED {
        return Err(format!(
            "its post_processor puts {num_added} tokens around each text"
        ));
    }
    Ok(())
}

fn part<T: for<'de> Deserialize<'de>>(value: Value) -> Result<Option<T>, String> {
    serde_json::from_value(value).map_err(|err| err.to_string())
}

/// These, and those of sequences, of which `parts_of` tells the parts, in their places.
fn flattened<T>(all: &[T], parts_of: fn(&T) -> Option<&[T]>) -> Vec<&T> {
    let each = all.iter().map(|it| match parts_of(it) {
        Some(parts) => flattened(parts, parts_of),
        None => vec![it],
    });
    each.flatten().collect()
}

/// What a change writes of its own, if it does, and in the place of how many bytes at least.
fn written(change: &impl Serialize) -> Result<Option<(String, usize)>, String> {
    let change = serde_json::to_value(change).map_err(|err| err.to_string())?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    Ok(match change["type"].as_str() {
        Some("Replace") => {
            let content = text(&change["content"]);
            let pattern = change["pattern"]["String"].as_str();
            if pattern == Some("") {
                return Err(format!(
                    "it replaces a text without letters by {content:.40?}"
                ));
            }
            Some((content, pattern.map_or(1, str::len)))
        }
        Some("Prepend") => Some((text(&change["prepend"]), 1)),
        _ => None,
    })
}

/// Checks what changes write, which those behind them change again: from the last one on, so that each is bounded before it is tried.
fn check_changes<T: Serialize>(
    changes: &[&T],
    change: impl Fn(&T, String) -> Result<String, String>,
) -> Result<(), String> {
    let mut num_tried = 0;
    for index in (0..changes.len()).rev() {
        let Some((mut text, num_replaced)) = written(changes[index])? else {
            continue;
        };
        let limit = num_replaced.saturating_mul(MOST_PER_BYTE).min(MOST_WRITTEN);
        let begin: String = text.chars().take(40).collect();
        for later in &changes[index + 1..] {
            num_tried += 64 + text.len();
            if text.len() > limit || num_tried > MOST_TRIED {
                break;
            }
            text = change(later, text)?;
        }
        if text.len() > limit || num_tried > MOST_TRIED {
            return Err(format!(
                "one of its replacements makes a text too long: {begin:?} and what others make of it have more than {limit} bytes"
            ));
        }
    }
    Ok(())
}

/// Checks the tables of characters of SentencePiece within a normalizer: a trie, behind its size in bytes, and what it leads to, with zeros
/// between.
fn check_precompiled(part: &Value) -> Result<(), String> {
    let parts = part["normalizers"].as_array();
    parts
        .into_iter()
        .flatten()
        .try_for_each(check_precompiled)?;
    let Some(table) = part["precompiled_charsmap"].as_str() else {
        return Ok(());
    };
    let damaged = || "its precompiled_charsmap is damaged".to_string();
    let table = BASE64_STANDARD_NO_PAD.decode(table.trim_end_matches('='));
    let table = table.map_err(|_| damaged())?;
    let (size, rest) = table.split_first_chunk::<4>().ok_or_else(damaged)?;
    let size = u32::from_le_bytes(*size) as usize;
    let texts = rest.get(size..).ok_or_else(damaged)?;
    let longest = texts.split(|byte| *byte == 0).map(<[u8]>::len).max();
    if longest.is_some_and(|longest| longest > MOST_PER_BYTE) {
        return Err(format!(
            "its precompiled_charsmap makes a text too long: a character becomes more than {MOST_PER_BYTE} bytes"
        ));
    }
    Ok(())
}

/// Checks that templates of a post-processor have a text once.
fn check_template(part: &Value) -> Result<(), String> {
    let parts = part["processors"].as_array();
    parts.into_iter().flatten().try_for_each(check_template)?;
    let pieces = part["single"].as_array().into_iter().flatten();
    if pieces
        .filter(|piece| piece.get("Sequence").is_some())
        .count()
        > 1
    {
        return Err("its post_processor has a text more than once".to_string());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn replace(pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    fn sequence(parts: &[Value]) -> Value {
        json!({"type": "Sequence", "normalizers": parts})
    }

    fn check(part: &str, value: Value) -> Result<(), String> {
        check_growth(json!({part: value}).to_string().as_bytes())
    }

    fn charsmap(texts: &[u8]) -> Value {
        let bytes = [&4_u32.to_le_bytes()[..], &[0; 4], texts].concat();
        let text = BASE64_STANDARD_NO_PAD.encode(bytes);
        json!({"type": "Precompiled", "precompiled_charsmap": text})
    }

    #[test]
    fn what_multiplies_a_text_is_refused() {
        let twenty = replace("a", &"a".repeat(20));
        check("normalizer", twenty.clone()).unwrap();
        let matches = |content: String| json!({"type": "Replace", "pattern": {"Regex": "."}, "content": content});
        let lowercase = json!({"type": "Lowercase"});
        let refused = [
            ("normalizer", sequence(&vec![twenty.clone(); 8])),
            (
                "normalizer",
                sequence(&[sequence(std::slice::from_ref(&twenty)), sequence(&[twenty])]),
            ),
            (
                "decoder",
                json!({"type": "Sequence", "decoders": vec![matches("b".repeat(20)); 3]}),
            ),
            (
                "normalizer",
                json!({"type": "Prepend", "prepend": "a".repeat(10 << 20)}),
            ),
            // Each alone would do.
            (
                "normalizer",
                sequence(&[
                    replace("a", &"B".repeat(200)),
                    lowercase.clone(),
                    replace("b", &"A".repeat(200)),
                    lowercase,
                ]),
            ),
            ("normalizer", charsmap(&[b'x'; 1000])),
        ];
        for (part, value) in refused {
            let error = check(part, value).unwrap_err();
            assert!(error.contains("makes a text too long"), "{error}");
        }
        let error = check("normalizer", replace("", "x")).unwrap_err();
        assert_eq!(error, "it replaces a text without letters by \"x\"");
        let error = check(
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        );
        assert_eq!(error.unwrap_err(), "its precompiled_charsmap is damaged");
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let twice = json!({"type": "TemplateProcessing", "single": [text, text], "pair": [], "special_tokens": {}});
        let error = check("post_processor", twice).unwrap_err();
        assert_eq!(error, "its post_processor has a text more than once");
    }

    #[test]
    fn what_files_ask_for_is_not() {
        let wide = ["ァ", "ィ", "ゥ", "ェ", "ォ", "ッ"];
        let wide = wide.map(
            |letter| json!({"type": "Replace", "pattern": {"Regex": letter}, "content": "ア"}),
        );
        let usual = [
            json!({"type": "Prepend", "prepend": "▁"}),
            replace(" ", "▁"),
            replace("\n", "<|line|>"),
            replace("\t", "<|tab|>"),
            json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}),
            json!({"type": "NFKC"}),
        ];
        check("normalizer", sequence(&[&usual[..], &wide].concat())).unwrap();
        check("normalizer", Value::Null).unwrap();
        // What an earlier one wrote is replaced by less.
        let many: Vec<Value> = (0..500).map(|_| replace("aa", "a")).collect();
        check("normalizer", sequence(&many)).unwrap();
    }
}
