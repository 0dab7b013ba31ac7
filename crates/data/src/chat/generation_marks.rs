//! `{% generation %} .. {% endgeneration %}`, with which a template says what the assistant writes.
//!
//! The template engine has no such tag. [`JinjaSource`](super::jinja_source::JinjaSource) puts tags in its place that the engine has and,
//! between them, a character that no text contains: the same text with marks in it.

use std::ops::Range;

/// Noncharacters of Unicode, which are for use inside programs.
pub(super) const BEGIN: char = '\u{FDD0}';
pub(super) const END: char = '\u{FDD1}';

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
