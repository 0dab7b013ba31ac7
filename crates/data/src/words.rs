//! Numbers and lists of things in messages.

/// `1 sequence`, `2 sequences`: a count with the noun of what is counted.
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Names that are told of a list.
const NUM_TOLD: usize = 8;

/// The first of `names`, and how many more there are.
pub(crate) fn few(names: &[impl AsRef<str>]) -> String {
    let told: Vec<&str> = names.iter().take(NUM_TOLD).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(NUM_TOLD) {
        0 => told.join(", "),
        more => format!("{} and {more} more", told.join(", ")),
    }
}
