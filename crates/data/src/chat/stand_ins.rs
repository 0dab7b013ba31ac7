//! Texts in place of those of a conversation, which tell where a chat template shows what.

use std::collections::BTreeSet;

/// Noncharacters of Unicode, which are for use inside programs: nothing that a template looks for.
pub(super) const BEGIN: char = '\u{FDD2}';
pub(super) const END: char = '\u{FDD3}';

/// What stands in place of the text that `label` names.
pub(super) fn stand_in(label: impl std::fmt::Display) -> String {
    format!("{BEGIN}{label}{END}")
}

/// The labels of the stand-ins in a text, but for those that come right after one of `except`.
pub(super) fn labels<'a>(text: &'a str, except: &[&str]) -> BTreeSet<&'a str> {
    let stand_ins = text.match_indices(BEGIN);
    let labels = stand_ins.filter_map(|(place, begin)| {
        let is_left_out = except.iter().any(|before| text[..place].ends_with(before));
        let (label, _) = text[place + begin.len()..].split_once(END)?;
        (!is_left_out).then_some(label)
    });
    labels.collect()
}
