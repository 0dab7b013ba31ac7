//! Command lines as people type them, and what is wrong with them.

pub(crate) mod flags;
pub(crate) mod flags_of_others;
pub(crate) mod short_help;
pub(crate) mod spellings;
