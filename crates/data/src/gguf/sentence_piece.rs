//! Vocabularies of SentencePiece, in which a space is ▁: `tokenizer.json` has their merges in order, and llama.cpp scores for what they make,
//! the highest of which it makes first (arXiv:1808.06226).

use std::collections::{HashMap, HashSet};

use candle_core::{Result, bail};
use serde_json::Value;

use super::SPACE;

/// Of what no merge makes.
const LOWEST: f32 = -1e9;

/// How spaces come into texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spaces {
    /// Whether one is put before a text.
    pub before_text: bool,
    /// Whether not before what follows a special token.
    pub first_only: bool,
}

/// What normalizers and pre-tokenizers of a vocabulary with ▁ do to texts.
pub(super) fn spaces(normalizers: &[Value], pre_tokenizers: &[Value]) -> Result<Spaces> {
    let space = SPACE.to_string();
    let mut spaces = Spaces {
        before_text: false,
        first_only: false,
    };
    let mut is_replaced = false;
    for step in normalizers.iter().chain(pre_tokenizers) {
        match step["type"].as_str().unwrap_or_default() {
            "Prepend" if step["prepend"] == space.as_str() => spaces.before_text = true,
            "Replace" if step["pattern"]["String"] == " " && step["content"] == space.as_str() => {
                is_replaced = true;
            }
            // There are no spaces any more.
            "Split" if is_replaced && step["pattern"]["String"] == " " => {}
            "Metaspace" if step["replacement"] == space.as_str() && step["split"] == false => {
                is_replaced = true;
                let scheme = step["prepend_scheme"].as_str().unwrap_or("always");
                spaces.before_text = scheme != "never";
                spaces.first_only = scheme == "first";
            }
            _ => bail!(
                "llama.cpp's tokenizer of this kind does nothing to texts but to write {SPACE} for spaces, and tokenizer.json also has {step}"
            ),
        }
    }
    match is_replaced {
        true => Ok(spaces),
        false => bail!(
            "tokenizer.json has merges of characters and nothing that writes {SPACE} for spaces, which llama.cpp's tokenizer of this kind does"
        ),
    }
}

/// The score of each token, and how many pairs llama.cpp would merge that the tokenizer does not.
pub(super) fn scores(tokens: &[Option<String>], merges: &[(String, String)]) -> (Vec<f32>, usize) {
    let mut rank_of: HashMap<String, usize> = HashMap::new();
    let mut pairs = HashSet::new();
    for (rank, (left, right)) in merges.iter().enumerate() {
        rank_of.entry(format!("{left}{right}")).or_insert(rank);
        pairs.insert((left.as_str(), right.as_str()));
    }
    let known: HashSet<&str> = tokens.iter().flatten().map(String::as_str).collect();
    let mut num_other = 0;
    let mut scores = Vec::new();
    for token in tokens {
        let Some(token) = token else {
            scores.push(LOWEST);
            continue;
        };
        let others = splits(token)
            .filter(|(left, right)| known.contains(left) && known.contains(right))
            .filter(|pair| !pairs.contains(pair));
        num_other += others.count();
        // Single characters are where merging begins, and no score counts.
        scores.push(match rank_of.get(token) {
            Some(rank) => -(*rank as f32),
            None if token.chars().nth(1).is_none() => 0.0,
            None => LOWEST,
        });
    }
    (scores, num_other)
}

/// All ways to cut a text in two.
fn splits(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.char_indices()
        .skip(1)
        .map(|(place, _)| text.split_at(place))
}
