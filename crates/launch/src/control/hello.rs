//! What a rank says of itself when it comes, and whether it belongs to the run.

use serde::{Deserialize, Serialize};

use super::{ControlConfig, wire};

/// What a rank says of itself when it comes. Versions may add fields, never change these.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub rank: usize,
    pub world_size: usize,
    pub host: String,
    pub pid: u32,
    pub fingerprint: Vec<(String, String)>,
    /// Why it cannot start, if so.
    #[serde(default)]
    pub cannot_start: Option<String>,
}

impl Hello {
    pub(super) fn new(config: &ControlConfig) -> Self {
        Self {
            rank: config.rank,
            world_size: config.world_size,
            host: config.host.clone(),
            pid: std::process::id(),
            fingerprint: config.fingerprint.clone(),
            cannot_start: config.cannot_start.clone(),
        }
    }

    /// What keeps a rank that knows the secret out of the run that `self`, rank 0, is in; `None` if nothing does.
    pub(super) fn objection(&self, other: &Hello, version: u32) -> Option<String> {
        let who = format!("rank {} on host {}", other.rank, other.host);
        if version != wire::VERSION {
            return Some(format!(
                "{who}: it speaks version {version} of the control protocol, expected {} as on rank 0\n\
                 hint: start the same build of the program on all hosts",
                wire::VERSION
            ));
        }
        if other.world_size != self.world_size {
            return Some(format!(
                "{who}: its world size is {}, expected {} as on rank 0\n\
                 hint: start all ranks with the same number of ranks",
                other.world_size, self.world_size
            ));
        }
        if other.rank >= self.world_size {
            return Some(format!(
                "{who}: expected a rank below the world size, {}",
                self.world_size
            ));
        }
        if self.cannot_start.is_some() || other.cannot_start.is_some() {
            // It may not have come to what there is to compare.
            return None;
        }
        let differences = self.differences(other);
        if differences.is_empty() {
            return None;
        }
        Some(format!(
            "{who}: {}\nhint: start all ranks with the same program, flags and data",
            differences.join("; ")
        ))
    }

    /// The names whose values differ, in rank 0's order.
    fn differences(&self, other: &Hello) -> Vec<String> {
        let value = |fingerprint: &[(String, String)], name: &str| {
            let found = fingerprint.iter().find(|(other, _)| other == name);
            found.map_or_else(|| "not given".to_string(), |(_, value)| value.clone())
        };
        let mut names: Vec<&String> = Vec::new();
        for (name, _) in self.fingerprint.iter().chain(&other.fingerprint) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let differs = |name: &&String| {
            let (got, expected) = (
                value(&other.fingerprint, name),
                value(&self.fingerprint, name),
            );
            (got != expected).then(|| format!("{name} is {got}, expected {expected} as on rank 0"))
        };
        names.iter().filter_map(differs).collect()
    }
}
