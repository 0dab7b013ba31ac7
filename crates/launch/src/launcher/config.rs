//! What a launcher is told.

use std::path::PathBuf;

use super::rendezvous_address::RendezvousAddress;

/// Which ranks to start where, and how; the same for one host and for many.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// Ranks to start on this host, where no host file says it.
    pub nproc_per_node: Option<usize>,
    /// Number of hosts, if a launcher is started on each.
    pub nnodes: usize,
    /// Number of this host, from 0.
    pub node_rank: Option<usize>,
    /// Where the ranks meet.
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
    /// How often all ranks are started again after a failure.
    pub max_restarts: usize,
    /// Start them again without hosts of the host file that are lost, if so many are left. Default: all.
    pub min_nodes: Option<usize>,
    /// Time that ranks have to end, before they are killed. Default: 10 after a failure, 300 after a signal.
    pub grace_secs: Option<f64>,
    /// Time without a word after which a host of the host file is given up. Default: 60.
    pub silence_secs: Option<f64>,
    /// Whether to print what would run where, and start nothing.
    pub dry_run: bool,
    /// The program and its arguments.
    pub program: Vec<String>,
}
