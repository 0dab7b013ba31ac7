//! How a rank joins its run.

use std::time::Duration;

use super::BEAT;
use crate::{RankEnv, Secret, WaitNotices};

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
    /// Whether all ranks are on this host: then `master` may be a name that means another address on other hosts.
    pub is_one_host: bool,
    /// What the ranks of this run know and others do not. They show each other that they know it, and do not send it.
    pub secret: Secret,
    /// Whether others may guess the secret. Rank 0 warns of that, unless it listens on loopback only. Default: as the environment
    /// says.
    pub is_guessable: bool,
    /// What must be the same on all ranks, by name: flags, data, code version. Default: nothing.
    pub fingerprint: Vec<(String, String)>,
    /// Why this rank cannot start, if it comes only to say so: then the run starts on none. Default: it can.
    pub cannot_start: Option<String>,
    /// How long ranks may take to come. Default: 5 minutes.
    pub join_timeout: Duration,
    /// When a rank says for whom it waits that has not come.
    pub wait_notices: WaitNotices,
    /// How long a rank may be blocked in one operation before the run is given up. Default: 10 minutes.
    pub deadline: Duration,
    /// A rank that says nothing for so long is taken for dead; the same on all ranks, a second at least. Default: 6 seconds.
    pub rank_timeout: Duration,
    /// Whether the process ends, by `_exit`, a second after it has said that another rank is gone. Default: true; false
    /// for ranks that are threads of one process.
    pub ends_process: bool,
}

impl ControlConfig {
    /// How often a rank says what it does and that it is alive: often enough that what is known of one that is killed is not much
    /// older than its end and that a few words may be late, and not so often that many ranks keep rank 0 busy.
    pub(super) fn beat_interval(&self) -> Duration {
        let interval = Duration::from_micros(500).saturating_mul(self.world_size as u32);
        let interval = interval.clamp(Duration::from_millis(50), BEAT);
        interval.min(self.rank_timeout / 8)
    }

    /// The rank and the secret of this process's environment; the ranks meet at `master`.
    pub fn at(env: &RankEnv, master: (String, u16)) -> Self {
        Self {
            rank: env.rank(),
            world_size: env.world_size(),
            host: env.host().to_string(),
            master,
            is_one_host: env.local_world_size() == env.world_size(),
            secret: env.secret().clone(),
            is_guessable: env.is_guessable(),
            fingerprint: Vec::new(),
            cannot_start: None,
            join_timeout: Duration::from_secs(300),
            wait_notices: WaitNotices::default(),
            deadline: Duration::from_secs(600),
            rank_timeout: Duration::from_secs(6),
            ends_process: true,
        }
    }
}
