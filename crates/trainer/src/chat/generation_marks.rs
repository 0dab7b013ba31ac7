//! `{% generation %} .. {% endgeneration %}`, with which a template says what the assistant writes.
//!
//! The template engine has no such tag. It is replaced by tags that it has and, between them, a character that no text
//! contains: the same text with marks in it. A tag's own dashes stay at its outer ends, so white space goes or stays as around it.

use std::ops::Range;

/// Noncharacters of Unicode, which are for use inside programs.
const BEGIN: char = '\u{FDD0}';
const END: char = '\u{FDD1}';

/// The template with each such tag replaced: (without marks, with marks), or `None` if it has none.
pub(super) fn replace_tags(source: &str) -> Option<(String, String)> {
    let mut found = false;
    let (mut plain, mut marked) = (String::new(), String::new());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start..start + len + 2];
        let inner = &tag[2..tag.len() - 2];
        let left = if inner.starts_with(['-', '+']) {
            &inner[..1]
        } else {
            ""
        };
        let right = if inner.len() > 1 && inner.ends_with(['-', '+']) {
            &inner[inner.len() - 1..]
        } else {
            ""
        };
        let word = inner[left.len()..inner.len() - right.len()].trim();
        let replaced = match word {
            "generation" => Some((
                format!("{{%{left} with {right}%}}"),
                format!("{{%{left} with %}}{BEGIN}{{% with {right}%}}"),
            )),
            "endgeneration" => Some((
                format!("{{%{left} endwith {right}%}}"),
                format!("{{%{left} endwith %}}{END}{{% endwith {right}%}}"),
            )),
            _ => None,
        };
        for text in [&mut plain, &mut marked] {
            *text += &rest[..start];
        }
        match replaced {
            Some((without, with)) => {
                found = true;
                plain += &without;
                marked += &with;
            }
            None => {
                plain += tag;
                marked += tag;
            }
        }
        rest = &rest[start + len + 2..];
    }
    plain += rest;
    marked += rest;
    found.then_some((plain, marked))
}

/// The bytes of `text` that are between marks in `marked`, which is the same text otherwise; `None` if it is not.
pub(super) fn marked_spans(text: &str, marked: &str) -> Option<Vec<Range<usize>>> {
    let mut spans = Vec::new();
    let mut begin = None;
    let mut place = 0;
    for c in marked.chars() {
        match c {
            BEGIN => begin = Some(place),
            END => spans.push(begin.take()?..place),
            _ => place += c.len_utf8(),
        }
    }
    let is_same = marked
        .chars()
        .filter(|c| ![BEGIN, END].contains(c))
        .eq(text.chars());
    (is_same && begin.is_none()).then_some(spans)
}
