//! What one host's agent has to run.

use serde::{Deserialize, Serialize};

use super::program::{own_program, quoted};

/// The ranks of one host. It travels as JSON, so that no shell has to quote it and no token shows in `ps`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HostPlan {
    /// The host's name.
    #[serde(skip)]
    pub(super) host: String,
    /// The command that runs commands there; none for this host.
    #[serde(skip)]
    pub(super) via: Option<Vec<String>>,
    /// Whether the process that is started for it here may take a short secret.
    #[serde(skip)]
    pub(super) short_secret: bool,
    /// The program, as the user wrote it.
    pub(super) program: String,
    /// Its arguments.
    pub(super) args: Vec<String>,
    /// The folder to run it in.
    pub(super) folder: String,
    /// The environment of all ranks of this host, on top of the agent's own.
    pub(super) env: Vec<(String, String)>,
    /// The number of the first rank; the others follow.
    pub(super) first_rank: usize,
    /// The number of ranks.
    pub(super) num_ranks: usize,
    /// The number of the first rank on its host.
    #[serde(default)]
    pub(super) first_local_rank: usize,
    /// Whether MPI started the agent, and knows its rank.
    #[serde(default)]
    pub(super) through_mpi: bool,
    /// The time from SIGTERM to SIGKILL where the front is gone and cannot say.
    pub(super) grace_ms: u64,
    /// Without a word from the front for this long, it counts as gone. A local front is known to be gone by its pipe.
    pub(super) silence_ms: Option<u64>,
}

impl HostPlan {
    /// The variables of the rank with this number among these, beyond those of all ranks.
    pub(super) fn rank_env(&self, local_rank: usize) -> [(&'static str, String); 2] {
        let on_host = self.first_local_rank + local_rank;
        [
            ("RANK", (self.first_rank + local_rank).to_string()),
            ("LOCAL_RANK", on_host.to_string()),
        ]
    }

    /// The words that start the agent: this program, on another host through ssh or what stands for it.
    pub(super) fn agent_words(&self) -> Vec<String> {
        let (own_program, agent) = (own_program(), "agent".to_string());
        let Some(via) = &self.via else {
            return vec![own_program, agent];
        };
        // What ssh runs goes through a shell there.
        let remote = [self.host.clone(), quoted(&own_program), agent];
        via.iter().cloned().chain(remote).collect()
    }

    /// A plan for each rank.
    pub(super) fn by_rank(&self) -> impl Iterator<Item = Self> {
        (0..self.num_ranks).map(|local_rank| Self {
            via: None,
            first_rank: self.first_rank + local_rank,
            first_local_rank: local_rank,
            num_ranks: 1,
            ..self.clone()
        })
    }
}
