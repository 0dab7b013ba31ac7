//! An operation between ranks, for reports.

use std::panic::Location;
use std::sync::Arc;

use super::RankGroup;

/// An operation between ranks: what a report says a rank was doing.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Whose operation it is.
    pub group: Arc<RankGroup>,
    /// Its number in the group, from 0; messages between two ranks have none.
    pub seq: Option<u64>,
    /// What was called, on what: `all_reduce(sum) of f32 [4]`. Equal on all members if `seq` is there.
    pub call: String,
    /// Where it was called.
    pub site: &'static Location<'static>,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            group,
            seq,
            call,
            site,
        } = self;
        write!(f, "{call} at {site} ({group}")?;
        if let Some(seq) = seq {
            write!(f, ", operation number {seq}")?;
        }
        f.write_str(")")
    }
}
