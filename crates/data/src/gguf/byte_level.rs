//! How texts are split before merges of bytes: the regular expressions of `tokenizer.json`, and llama.cpp's names for them
//! (`tokenizer.ggml.pre`).

use candle_core::{Result, bail};
use serde_json::Value;
use strsim::normalized_damerau_levenshtein as similarity;

/// GPT-2's own, which a ByteLevel pre-tokenizer has without a regular expression.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Stands for a Digits pre-tokenizer that splits each digit off.
const DIGITS: &str = r"\p{N}";

/// A way in which texts are split.
#[derive(Debug, PartialEq)]
pub(super) struct Pre {
    /// llama.cpp's name.
    pub name: &'static str,
    /// One regular expression after the other.
    steps: &'static [&'static str],
    /// Whether a word that is a token is that, whatever the merges make of it.
    ignores_merges: bool,
}

const fn pre(name: &'static str, steps: &'static [&'static str], ignores_merges: bool) -> Pre {
    Pre {
        name,
        steps,
        ignores_merges,
    }
}

const KNOWN: [Pre; 8] = [
    pre("gpt-2", &[GPT2], false),
    pre("llama-bpe", &[LLAMA3], true),
    pre("smaug-bpe", &[LLAMA3], false),
    pre("qwen2", &[QWEN2], false),
    pre("qwen35", &[QWEN35], false),
    pre("tekken", &[TEKKEN], true),
    pre("gpt-4o", &[GPT4O], false),
    pre("smollm", &[DIGITS, GPT2], false),
];

/// The one by which a tokenizer with these pre-tokenizers splits. `matters` tells whether it makes a difference that words which are tokens
/// are taken whole, as `ignores_merges` says.
pub(super) fn find(
    pre_tokenizers: &[Value],
    ignores_merges: bool,
    matters: impl Fn() -> bool,
) -> Result<&'static Pre> {
    let steps = steps(pre_tokenizers)?;
    let same_steps = |pre: &&Pre| pre.steps == steps;
    let mut same = KNOWN.iter().filter(same_steps);
    if let Some(pre) = same
        .clone()
        .find(|pre| pre.ignores_merges == ignores_merges)
    {
        return Ok(pre);
    }
    match same.next() {
        Some(pre) if !matters() => Ok(pre),
        Some(pre) => bail!(
            "llama.cpp splits texts by this tokenizer's regular expression as {:?}, which {} words that are tokens whole whatever the merges are, \
             and tokenizer.json has ignore_merges {ignores_merges}: some texts would have other tokens there",
            pre.name,
            if pre.ignores_merges {
                "takes"
            } else {
                "does not take"
            }
        ),
        None => {
            let own = steps.join("  then  ");
            // Of equal ones the first.
            let nearest = KNOWN
                .iter()
                .rev()
                .map(|pre| (similarity(&own, &pre.steps.join("  then  ")), pre));
            let nearest = nearest
                .max_by(|a, b| a.0.total_cmp(&b.0))
                .map(|(_, pre)| pre);
            let nearest = nearest.unwrap_or(&KNOWN[0]);
            bail!(
                "no pre-tokenizer that this program knows of llama.cpp splits texts as tokenizer.json does: {own}\nhint: the nearest is {:?}: {}",
                nearest.name,
                nearest.steps.join("  then  ")
            )
        }
    }
}

impl Pre {
    /// What llama.cpp, whose own expression it is not, makes otherwise of texts.
    pub fn difference(&self) -> Option<String> {
        ["tekken", "gpt-4o"].contains(&self.name).then(|| {
            format!(
                "llama.cpp cuts combining marks off their letters with its {:?}, and tokenizer.json does not: texts in Hindi and others that are written with \
                 such marks have other tokens there",
                self.name
            )
        })
    }
}

/// The regular expressions of pre-tokenizers, in one spelling.
fn steps(pre_tokenizers: &[Value]) -> Result<Vec<String>> {
    let mut steps = Vec::new();
    for pre_tokenizer in pre_tokenizers {
        let flag = |name: &str| pre_tokenizer[name] == true;
        match pre_tokenizer["type"].as_str().unwrap_or_default() {
            "ByteLevel" if flag("add_prefix_space") => bail!(
                "tokenizer.json has add_prefix_space, and llama.cpp puts no space before texts of such a tokenizer"
            ),
            "ByteLevel" => {
                // It has it where nothing says otherwise.
                if pre_tokenizer["use_regex"] != false {
                    steps.push(GPT2.to_string());
                }
            }
            "Digits" if flag("individual_digits") => steps.push(DIGITS.to_string()),
            "Split" => match (
                &pre_tokenizer["pattern"]["Regex"],
                &pre_tokenizer["behavior"],
            ) {
                (Value::String(regex), Value::String(behavior))
                    if behavior
                        == if flag("invert") {
                            "Removed"
                        } else {
                            "Isolated"
                        } =>
                {
                    steps.push(in_one_spelling(regex));
                }
                _ => steps.push(pre_tokenizer.to_string()),
            },
            _ => steps.push(pre_tokenizer.to_string()),
        }
    }
    Ok(steps)
}

/// Files have the ends of English words in two spellings.
fn in_one_spelling(regex: &str) -> String {
    regex.replace(
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{KNOWN, LLAMA3, find};

    /// As `tokenizer.json` has them; `scripts/llama-cpp-check.sh` looks at what llama.cpp makes of them.
    #[test]
    fn each_is_found() {
        let file = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/pre_tokenizers.json"
        );
        let cases: Vec<Value> =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(cases.len(), KNOWN.len());
        for case in cases {
            let list = case["pre_tokenizer"]["pretokenizers"].as_array().unwrap();
            let found = find(list, case["ignore_merges"] == true, || true).unwrap();
            assert_eq!(found.name, case["name"]);
        }
        let bare = [json!({"type": "ByteLevel", "add_prefix_space": false})];
        assert_eq!(find(&bare, false, || true).unwrap().name, "gpt-2");
    }

    /// llama.cpp's own expressions for these two know no marks.
    #[test]
    fn combining_marks_are_told_where_they_are_cut_off() {
        for pre in &KNOWN {
            let told = pre.difference().unwrap_or_default();
            let has_marks = ["tekken", "gpt-4o"].contains(&pre.name);
            assert_eq!(told.contains("combining marks"), has_marks, "{told}");
            assert_eq!(told.contains(pre.name), has_marks, "{told}");
        }
    }

    #[test]
    fn the_guide_names_each() {
        let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/gguf.md");
        let guide = std::fs::read_to_string(guide).unwrap();
        let missing = KNOWN
            .iter()
            .find(|pre| !guide.contains(&format!("`{}`", pre.name)));
        assert_eq!(missing, None);
    }

    #[test]
    fn others_are_refused() {
        let split = |regex: &str| -> Vec<Value> {
            let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            vec![
                split,
                json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}),
            ]
        };
        let near = LLAMA3.replace("{1,3}", "{1,4}");
        let err = find(&split(&near), true, || true).unwrap_err().to_string();
        assert!(
            err.contains(&near) && err.contains("nearest is \"llama-bpe\""),
            "{err}"
        );
        let prefix = [json!({"type": "ByteLevel", "add_prefix_space": true})];
        let err = find(&prefix, false, || true).unwrap_err().to_string();
        assert!(err.contains("add_prefix_space"), "{err}");
        // It makes a difference whether merges are ignored, or none.
        let qwen = split(super::QWEN2);
        let err = find(&qwen, true, || true).unwrap_err().to_string();
        assert!(err.contains("ignore_merges"), "{err}");
        assert_eq!(find(&qwen, true, || false).unwrap().name, "qwen2");
    }
}
