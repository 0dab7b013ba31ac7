//! Where a long text may be cut so that its parts, encoded one by one, have the ids of the whole.
//!
//! A tokenizer of this kind finds added tokens, normalizes, cuts the text into words by a pattern, and encodes each
//! word by itself. With any of the [patterns](PATTERNS) and whatever is around it, a word ends
//! - after a line break between two characters that are no white space;
//! - before a space after a character that is no white space;
//! - between a letter and a character of ASCII or a punctuation mark of Chinese that is none, which texts without
//!   spaces have.
//!
//! This is so because
//! - what a pattern matches before such a place depends on no more than the next character, and ends there as at the
//!   end of a part;
//! - a match that has the line break in it began at it, or with [`\[\r\n\]*`](PATTERNS) before it, and what follows is neither;
//! - no pattern looks at what is behind;
//! - NFC composes none of these characters with what is before it;
//! - an added token has no line break in it, takes no white space before it, and neither ends nor goes on at the other
//!   places.

use serde_json::{Value, json};

/// Bytes of a part that is worth a core of its own. While it is encoded it takes some 250 times as much.
pub(crate) const PART_BYTES: usize = 1 << 18;

/// How GPT-4, Llama 3 and Qwen cut words; GPT-2's is built in. Others, such as GPT-4o's with `[\r\n/]*`, let words go on after a line break.
const PATTERNS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Where the texts of a tokenizer may be cut.
#[derive(Clone, Debug)]
pub(crate) struct Borders {
    /// What added tokens are spelled as.
    added: Vec<String>,
}

/// The places where the ids of a text are those of its [parts](Borders::parts) with this tokenizer; `None` if that is
/// not known.
pub(crate) fn borders_of(tokenizer: &tokenizers::Tokenizer) -> Option<Borders> {
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
    (is_normalized && cuts_at_lines && added.values().all(is_plain)).then(|| Borders {
        added: added.into_values().map(|token| token.content).collect(),
    })
}

impl Borders {
    /// Parts of a text of about `num_bytes`, which end at borders, or with the text.
    pub fn parts<'t>(&self, text: &'t str, num_bytes: usize) -> Vec<&'t str> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(end) = self.first(rest, num_bytes.max(1)) {
            let (part, after) = rest.split_at(end);
            parts.push(part);
            rest = after;
        }
        parts.push(rest);
        parts
    }

    /// The first border in `text` that is not before `num_bytes`.
    fn first(&self, text: &str, num_bytes: usize) -> Option<usize> {
        let mut places = (num_bytes..text.len()).filter(|&at| text.is_char_boundary(at));
        places.find(|&at| {
            let (before, after) = text.split_at(at);
            let mut before = before.chars().rev();
            match (before.next(), after.chars().next()) {
                (Some('\n'), Some(next)) => is_dark(next) && before.next().is_some_and(is_dark),
                (Some(last), Some(next)) => ends_word(last, next) && !self.is_at_added(text, at),
                _ => false,
            }
        })
    }

    /// Whether an added token begins, ends or goes on at a place.
    fn is_at_added(&self, text: &str, at: usize) -> bool {
        let text = text.as_bytes();
        self.added.iter().map(String::as_bytes).any(|token| {
            let mut starts = at.saturating_sub(token.len())..=at;
            starts.any(|start| text[start..].starts_with(token))
        })
    }
}

fn is_dark(c: char) -> bool {
    !c.is_whitespace()
}

/// Whether a word ends between two characters.
fn ends_word(last: char, next: char) -> bool {
    let is_letter = last.is_ascii_alphabetic() || ('\u{4e00}'..='\u{9fa5}').contains(&last);
    let is_none = next.is_ascii() && !next.is_ascii_alphabetic() || "、。，！？：；".contains(next);
    next == ' ' && is_dark(last) || is_letter && is_none
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    use super::borders_of;
    use crate::vocabulary::Tokenizer;

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
            let borders = borders_of(tokenizer.inner()).unwrap();
            let mut num_parts = 0;
            for _ in 0..40 {
                let pieces = (0..300).map(|_| PIECES[random.next_u32() as usize % PIECES.len()]);
                let text: String = pieces.collect();
                let want = tokenizer.encode(&text).unwrap();
                for num_bytes in [1, 37] {
                    let parts = borders.parts(&text, num_bytes);
                    num_parts += parts.len();
                    assert_eq!(parts.concat(), text);
                    let ids = parts.iter().map(|part| tokenizer.encode(part).unwrap());
                    assert_eq!(ids.collect::<Vec<_>>().concat(), want, "{name}: {text:?}");
                }
            }
            assert!(num_parts > 500, "{name}: {num_parts}");
        }
    }

    /// While a part is encoded it takes some 250 times as much memory.
    #[test]
    fn texts_without_line_breaks_have_parts_too() {
        let tokenizer = tokenizer("tests/fixtures/chat/llama3");
        let borders = borders_of(tokenizer.inner()).unwrap();
        for text in [
            "the quick brown fox ",
            "слово за словом ",
            "{\"x\":[1,2,\"<|eot_id|>\"]}",
            "火星，木星、土星。",
            "d2hhdCBpcyBpdD8",
        ] {
            let text = text.repeat(100);
            let parts = borders.parts(&text, 100);
            let longest = parts.iter().map(|part| part.len()).max().unwrap();
            assert!(longest < 130, "{longest}: {text}");
            let ids = parts.iter().map(|part| tokenizer.encode(part).unwrap());
            let whole = tokenizer.encode(&text).unwrap();
            assert_eq!(ids.collect::<Vec<_>>().concat(), whole, "{text}");
        }
        // Of a word there is only one.
        assert_eq!(borders.parts(&"a".repeat(1000), 100).len(), 1);
    }

    #[test]
    fn tokenizers_of_which_this_is_not_known_are_left_alone() {
        // The last has a token that takes the white space before it.
        for name in ["llama2", "mistral", "zephyr", "added"] {
            let tokenizer = tokenizer(&format!("tests/fixtures/chat/{name}"));
            assert!(borders_of(tokenizer.inner()).is_none(), "{name}");
        }
    }

    #[test]
    fn a_text_of_many_parts_has_the_special_tokens_of_one() {
        let line = "The quick brown fox, 1234 times.\n";
        let text = line.repeat((5 * super::PART_BYTES / 2) / line.len());
        let tokenizer = tokenizer("tests/fixtures/chat/llama3");
        let borders = borders_of(tokenizer.inner()).unwrap();
        assert_eq!(borders.parts(&text, super::PART_BYTES).len(), 3);
        let ids = tokenizer.encode_with_special_tokens(&text).unwrap();
        let whole = tokenizer.inner().encode_fast(text, true).unwrap();
        assert!(ids == whole.get_ids());
    }
}
