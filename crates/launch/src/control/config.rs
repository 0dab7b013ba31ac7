//! How a rank joins its run.

use std::time::Duration;

use crate::{RankEnv, Result};

/// How a rank joins its run: see [`Control::join`](super::Control::join).
#[derive(Debug, Clone)]
pub struct ControlConfig {
    /// This process's number in the run.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The name of this host, for messages.
    pub host: String,
    /// Host name or address of rank 0, and the port where it waits for the others.
    pub master: (String, u16),
    /// Whether all ranks are on this host: then rank 0 listens on loopback only, if `master` is there.
    pub is_one_host: bool,
    /// What the ranks of this run know and others do not. It is sent in the clear.
    pub token: String,
    /// What must be the same on all ranks, by name: flags, data, code version. Default: nothing.
    pub fingerprint: Vec<(String, String)>,
    /// Why this rank cannot start, if it comes only to say so: then the run starts on none. Default: it can.
    pub cannot_start: Option<String>,
    /// How long ranks may take to come. Default: 5 minutes.
    pub join_timeout: Duration,
    /// How long a rank may be blocked in one operation before the run is given up. Default: 10 minutes.
    pub deadline: Duration,
    /// Whether the process ends, by `_exit`, a second after it has said that another rank is gone. Default: true; false
    /// for ranks that are threads of one process.
    pub ends_process: bool,
}

impl ControlConfig {
    /// The rank, the meeting point and the token of this process's environment.
    ///
    /// # Errors
    /// The environment does not say where the ranks meet.
    pub fn new(env: &RankEnv) -> Result<Self> {
        Ok(Self::at(env, env.master()?))
    }

    /// The rank and the token of this process's environment; the ranks meet at `master`.
    pub fn at(env: &RankEnv, master: (String, u16)) -> Self {
        Self {
            rank: env.rank(),
            world_size: env.world_size(),
            host: env.host().to_string(),
            master,
            is_one_host: env.local_world_size() == env.world_size(),
            token: env.run_token().to_string(),
            fingerprint: Vec::new(),
            cannot_start: None,
            join_timeout: Duration::from_secs(300),
            deadline: Duration::from_secs(600),
            ends_process: true,
        }
    }
}
