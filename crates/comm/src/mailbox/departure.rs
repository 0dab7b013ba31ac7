//! The end of a rank, as the others hear of it.

/// The end of a rank, as the others hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The rank.
    pub rank: usize,
    /// Why it is gone; `None` if it has left because it was done.
    pub why: Option<String>,
}

impl std::fmt::Display for Departure {
    /// `rank 3 has left`, or `rank 3 is gone: ` and why.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.why {
            None => write!(f, "rank {} has left", self.rank),
            Some(why) => write!(f, "rank {} is gone: {why}", self.rank),
        }
    }
}
