//! Numbers of things in messages.

/// `1 sequence`, `2 sequences`: a count with the noun of what is counted.
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}
