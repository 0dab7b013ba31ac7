//! What a launcher is told.

use std::path::PathBuf;
use std::str::FromStr;

use super::rendezvous_address::RendezvousAddress;
use crate::WaitNotices;
use crate::rank_env::SHORT_SECRET;

/// How many hosts a run may have, MIN:MAX, or one number for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeRange {
    /// At least 1.
    pub min: usize,
    /// At least as many.
    pub max: usize,
}

impl FromStr for NodeRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (min.parse(), max.parse()) {
            (Ok(min @ 1..), Ok(max)) if min <= max => Ok(Self { min, max }),
            _ => Err(format!(
                "expected a number of hosts, or MIN:MAX with 1 <= MIN <= MAX, got {text:?}"
            )),
        }
    }
}

/// Which ranks to start where, and how; the same for one host and for many.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// Ranks to start on this host, where no host file says it.
    pub nproc_per_node: Option<usize>,
    /// Number of hosts, if a launcher is started on each; of a host file, how many have to be there. Default: one; all.
    pub nnodes: Option<NodeRange>,
    /// Where the ranks meet; or the launchers, of which the one on this host leads.
    pub rdzv: Option<RendezvousAddress>,
    /// File of the hosts to start ranks on.
    pub hostfile: Option<PathBuf>,
    /// Command that runs a command on a host of the host file. Default: ssh.
    pub ssh: Option<String>,
    /// Command of an MPI library that starts ranks, if they are to be started by it. Default: mpirun or srun, for programs that ask for it.
    pub mpirun: Option<String>,
    /// Variables of all ranks, as `NAME=VALUE`, or as `NAME` with the value that it has here.
    pub env: Vec<String>,
    /// Folder for each rank's output.
    pub log_dir: Option<PathBuf>,
    /// So many ranks may fail, rank 0 not among them, while the others go on.
    pub may_lose: usize,
    /// How often all ranks are started again after a failure.
    pub max_restarts: usize,
    /// Time that ranks have to end, before they are killed. Default: 10 after a failure, 300 after a signal.
    pub grace_secs: Option<f64>,
    /// Time without a word after which a host of the host file is given up. Default: 60.
    pub silence_secs: Option<f64>,
    /// When this launcher says for which hosts it waits.
    pub wait_notices: WaitNotices,
    /// Whether a secret of fewer than 16 bytes is meant: see [`Secret::is_short`](crate::Secret::is_short).
    pub short_secret: bool,
    /// Whether to print what would run where, and start nothing.
    pub dry_run: bool,
    /// The program and its arguments.
    pub program: Vec<String>,
}

/// What processes are told that read the secret, too, if a short one is meant.
pub(super) fn secret_variable(is_short_meant: bool) -> Option<(&'static str, &'static str)> {
    is_short_meant.then_some((SHORT_SECRET, "1"))
}

impl LaunchConfig {
    /// Whether there is a launcher on each host, of which one leads the others.
    pub(super) fn is_led(&self) -> bool {
        let is_one = self.nnodes.is_none_or(|nnodes| nnodes.max == 1);
        self.hostfile.is_none() && !is_one
    }
}
