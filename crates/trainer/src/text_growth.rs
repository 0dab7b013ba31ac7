//! How much longer a tokenizer may make a text before it is split, or tokens when they become text.

use serde_json::Value;

/// Bytes that may stand in the place of one that is replaced. Files of known models write up to three.
const MOST_PER_BYTE: usize = 256;

/// Bytes that may be put before a text.
const MOST_BEFORE: usize = 1 << 16;

/// A change of a text by a normalizer or a decoder.
enum Change<'a> {
    Replace {
        pattern: &'a str,
        content: &'a str,
    },
    /// Of what matches a regular expression.
    ReplaceMatches {
        content: &'a str,
    },
    Prepend(&'a str),
}

/// Checks the changes of a normalizer or a decoder, as `tokenizer.json` has it: what one writes the later ones change again.
///
/// # Errors
/// One that replaces nothing, and one that writes more than the limits above.
pub(crate) fn check_growth(part: &Value) -> Result<(), String> {
    let mut changes = Vec::new();
    collect(part, &mut changes);
    for (index, change) in changes.iter().enumerate() {
        let (content, limit) = match change {
            Change::Replace {
                pattern: "",
                content,
            } => {
                return Err(format!(
                    "it replaces a text without letters by {content:.40?}"
                ));
            }
            Change::Replace { pattern, content } => {
                (content, pattern.len().saturating_mul(MOST_PER_BYTE))
            }
            Change::ReplaceMatches { content } => (content, MOST_PER_BYTE),
            Change::Prepend(content) => (content, MOST_BEFORE),
        };
        if changed_len(content, &changes[index + 1..], limit) > limit {
            return Err(format!(
                "one of its replacements makes a text too long: {content:.40?} and what later ones write in its place have more than \
                 {limit} bytes"
            ));
        }
    }
    Ok(())
}

/// Adds the changes of a part, and of those that it is a `Sequence` of.
fn collect<'a>(part: &'a Value, changes: &mut Vec<Change<'a>>) {
    let text = |value: &'a Value| value.as_str().unwrap_or_default();
    match part["type"].as_str() {
        Some("Sequence") => {
            let parts = [&part["normalizers"], &part["decoders"]];
            let parts = parts.into_iter().filter_map(Value::as_array).flatten();
            parts.for_each(|part| collect(part, changes));
        }
        Some("Replace") => {
            let content = text(&part["content"]);
            changes.push(match part["pattern"]["String"].as_str() {
                Some(pattern) => Change::Replace { pattern, content },
                None => Change::ReplaceMatches { content },
            });
        }
        Some("Prepend") => changes.push(Change::Prepend(text(&part["prepend"]))),
        _ => {}
    }
}

/// The most bytes that a text has after these changes, or some number over `limit`.
fn changed_len(text: &str, changes: &[Change<'_>], limit: usize) -> usize {
    let mut text = text.to_string();
    // Of what regular expressions have written nobody knows where.
    let mut times = 1_usize;
    for change in changes {
        if text.len().saturating_mul(times) > limit {
            break;
        }
        match change {
            Change::Replace { pattern, content } if !pattern.is_empty() => {
                let num_matches = text.matches(pattern).count();
                let len = text.len() - num_matches * pattern.len();
                let len = len.saturating_add(num_matches.saturating_mul(content.len()));
                if len > limit {
                    return len;
                }
                text = text.replace(pattern, content);
            }
            Change::ReplaceMatches { content } => {
                times = times.saturating_mul(content.len().max(1));
            }
            Change::Replace { .. } | Change::Prepend(_) => {}
        }
    }
    text.len().saturating_mul(times)
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

    #[test]
    fn what_multiplies_a_text_is_refused() {
        let twenty = replace("a", &"a".repeat(20));
        check_growth(&twenty).unwrap();
        let matches = |content: String| json!({"type": "Replace", "pattern": {"Regex": "."}, "content": content});
        let refused = [
            sequence(&vec![twenty.clone(); 8]),
            sequence(&[sequence(&[twenty.clone()]), sequence(&[twenty])]),
            json!({"type": "Sequence", "decoders": vec![matches("b".repeat(20)); 3]}),
            json!({"type": "Prepend", "prepend": "a".repeat(10 << 20)}),
            sequence(&[
                json!({"type": "Prepend", "prepend": "a".repeat(60_000)}),
                replace("a", "bb"),
            ]),
        ];
        for part in refused {
            let error = check_growth(&part).unwrap_err();
            assert!(
                error.starts_with("one of its replacements makes"),
                "{error}"
            );
        }
        let error = check_growth(&replace("", "x")).unwrap_err();
        assert_eq!(error, "it replaces a text without letters by \"x\"");
    }

    #[test]
    fn what_files_ask_for_is_not() {
        let usual = sequence(&[
            json!({"type": "Prepend", "prepend": "▁"}),
            replace(" ", "▁"),
            replace("\n", "<|line|>"),
            replace("\t", "<|tab|>"),
            json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}),
            json!({"type": "NFKC"}),
        ]);
        check_growth(&usual).unwrap();
        check_growth(&Value::Null).unwrap();
        // What an earlier one wrote is replaced by less.
        let many: Vec<Value> = (0..2000).map(|_| replace("aa", "a")).collect();
        check_growth(&sequence(&many)).unwrap();
    }
}
