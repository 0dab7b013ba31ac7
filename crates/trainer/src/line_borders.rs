//! Where a long text may be cut so that its parts, encoded one by one, have the ids of the whole.
//!
//! A tokenizer of this kind finds added tokens, normalizes, cuts the text into words by a pattern, and encodes each word by itself. A line break
//! between two characters that are no white space ends a word, with any of the [patterns](PATTERNS) and whatever is around it:
//! - what a pattern matches before it depends on no more than the next character, which in the part is the end where it was no white space;
//! - a match that has the line break in it began at it, or with [`\[\r\n\]*`](PATTERNS) before it, and what follows is neither;
//! - NFC composes a line break with nothing;
//! - an added token has no line break in it, and takes white space after it but none before it.

use serde_json::{Value, json};

/// Bytes of a part that is worth a core of its own.
pub(crate) const PART_BYTES: usize = 1 << 20;

/// How GPT-4, Llama 3 and Qwen cut words; GPT-2's is built in. Others, such as GPT-4o's with `[\r\n/]*`, let words go on after a line break.
const PATTERNS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Whether the ids of a text are those of its [parts](parts), with this tokenizer.
pub(crate) fn has_line_borders(tokenizer: &tokenizers::Tokenizer) -> bool {
    let json = |part: serde_json::Result<Value>| part.unwrap_or_default();
    let normalizer = json(serde_json::to_value(tokenizer.get_normalizer()));
    let pre_tokenizer = json(serde_json::to_value(tokenizer.get_pre_tokenizer()));
    let steps = pre_tokenizer["pretokenizers"].as_array();
    let steps = steps.map_or(std::slice::from_ref(&pre_tokenizer), Vec::as_slice);
    let is_byte_level = |step: &Value, use_regex: bool| {
        step["type"] == "ByteLevel"
            && step["add_prefix_space"] == false
            && step["use_regex"] == use_regex
    };
    let is_known = |step: &Value| {
        let pattern = step["pattern"]["Regex"].as_str();
        step["type"] == "Split"
            && step["behavior"] == "Isolated"
            && step["invert"] == false
            && pattern.is_some_and(|pattern| PATTERNS.contains(&pattern))
    };
    let cuts_at_lines = match steps {
        [step] => is_byte_level(step, true),
        [first, second] => is_known(first) && is_byte_level(second, false),
        _ => false,
    };
    let added = tokenizer.get_added_tokens_decoder();
    let is_plain = |token: &tokenizers::AddedToken| !token.lstrip && !token.content.contains('\n');
    let is_normalized = normalizer == Value::Null || normalizer == json!({"type": "NFC"});
    is_normalized && cuts_at_lines && added.values().all(is_plain)
}

/// Parts of a text of about `num_bytes`, which end at line breaks between two characters that are no white space, or with the text.
pub(crate) fn parts(text: &str, num_bytes: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(end) = border(rest, num_bytes) {
        let (part, after) = rest.split_at(end);
        parts.push(part);
        rest = after;
    }
    parts.push(rest);
    parts
}

/// The first such place in `text` that is not before `num_bytes`.
fn border(text: &str, num_bytes: usize) -> Option<usize> {
    let is_dark = |c: Option<char>| c.is_some_and(|c| !c.is_whitespace());
    let bytes = text.bytes().enumerate().skip(num_bytes.max(1));
    let mut breaks = bytes.filter_map(|(at, byte)| (byte == b'\n').then_some(at));
    let at = breaks.find(|&at| {
        is_dark(text[..at].chars().next_back()) && is_dark(text[at + 1..].chars().next())
    });
    Some(at? + 1)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    use super::{has_line_borders, parts};
    use crate::Tokenizer;

    /// What patterns tell apart, and what one could take for something else.
    const PIECES: [&str; 34] = [
        "a",
        "Word",
        "'s",
        "'LL",
        "'",
        " ",
        "  ",
        "\n",
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "\t",
        "7",
        "12345",
        "!?",
        "...",
        "/",
        "。",
        "é",
        "e\u{301}",
        "\u{301}",
        "🦀",
        "\u{a0}",
        "\u{85}",
        "\u{2028}",
        "\u{200d}",
        "<|im_end|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "</s>",
        "字",
        "\u{3000}",
    ];

    fn tokenizer(name: &str) -> Tokenizer {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        Tokenizer::from_dir(root.join(name)).unwrap()
    }

    #[test]
    fn parts_have_the_ids_of_the_whole() {
        let mut random = ChaCha8Rng::seed_from_u64(5);
        for name in ["llama3", "qwen2.5", "qwen3", "chatml", "split"] {
            let tokenizer = tokenizer(&format!("tests/fixtures/chat/{name}"));
            assert!(has_line_borders(tokenizer.inner()), "{name}");
            let mut num_parts = 0;
            for _ in 0..40 {
                let pieces = (0..300).map(|_| PIECES[random.next_u32() as usize % PIECES.len()]);
                let text: String = pieces.collect();
                let want = tokenizer.encode(&text).unwrap();
                for num_bytes in [1, 37] {
                    let parts = parts(&text, num_bytes);
                    num_parts += parts.len();
                    assert_eq!(parts.concat(), text);
                    let ids = parts.iter().map(|part| tokenizer.encode(part).unwrap());
                    assert_eq!(ids.collect::<Vec<_>>().concat(), want, "{name}: {text:?}");
                }
            }
            assert!(num_parts > 500, "{name}: {num_parts}");
        }
    }

    #[test]
    fn tokenizers_of_which_this_is_not_known_are_left_alone() {
        // The last has a token that takes the white space before it.
        for name in ["llama2", "mistral", "zephyr", "added"] {
            let tokenizer = tokenizer(&format!("tests/fixtures/chat/{name}"));
            assert!(!has_line_borders(tokenizer.inner()), "{name}");
        }
    }

    #[test]
    fn a_text_of_many_parts_has_the_special_tokens_of_one() {
        let line = "The quick brown fox, 1234 times.\n";
        let text = line.repeat((5 * super::PART_BYTES / 2) / line.len());
        let tokenizer = tokenizer("tests/fixtures/chat/llama3");
        assert_eq!(parts(&text, super::PART_BYTES).len(), 3);
        let ids = tokenizer.encode_with_special_tokens(&text).unwrap();
        let whole = tokenizer.inner().encode_fast(text, true).unwrap();
        assert!(ids == whole.get_ids());
    }
}
