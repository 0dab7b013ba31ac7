//! Texts in place of those of a conversation, which tell where a chat template shows what.

use std::collections::BTreeSet;

/// Noncharacters of Unicode, which are for use inside programs: nothing that a template looks for.
pub(super) const BEGIN: char = '\u{FDD2}';
pub(super) const END: char = '\u{FDD3}';

/// What stands in place of the text that `label` names.
pub(super) fn stand_in(label: impl std::fmt::Display) -> String {
    format!("{BEGIN}{label}{END}")
}

/// The labels of all stand-ins in a text.
pub(super) fn labels(text: &str) -> BTreeSet<&str> {
    let after = text.split(BEGIN).skip(1);
    after
        .filter_map(|after| Some(after.split_once(END)?.0))
        .collect()
}
