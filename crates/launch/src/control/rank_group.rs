//! A group of ranks by name.

use serde::{Deserialize, Serialize};

/// A group of ranks with an id that all its members call it by and no other group has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGroup {
    /// The id, as "world" or "world/3:1".
    pub id: String,
    /// The world ranks of the members.
    pub members: Vec<usize>,
}

impl RankGroup {
    /// The group of all ranks.
    pub fn world(world_size: usize) -> Self {
        let id = "world".to_string();
        let members = (0..world_size).collect();
        Self { id, members }
    }
}

impl std::fmt::Display for RankGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "group {:?}", self.members)
    }
}
