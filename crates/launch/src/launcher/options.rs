//! What `candle-train launch` is told.

use std::path::PathBuf;

use super::rendezvous_address::RendezvousAddress;

/// Start the ranks of a run, on this host or on several, and end them together.
#[derive(Debug, Clone, clap::Args)]
pub struct LaunchOptions {
    /// Number of ranks to start on this host
    #[arg(long, value_name = "N", required_unless_present = "hostfile")]
    pub(super) nproc_per_node: Option<usize>,
    /// Number of hosts, if this command is run once on each
    #[arg(long, value_name = "M", default_value_t = 1)]
    pub(super) nnodes: usize,
    /// Number of this host, from 0 (the one that --rdzv names)
    #[arg(long, value_name = "R")]
    pub(super) node_rank: Option<usize>,
    /// Where the ranks meet: a name of the first host, and a port that is free there
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) rdzv: Option<RendezvousAddress>,
    /// Token of this run, the same on all its hosts: ranks with another one are refused [default: random, or with
    /// --nnodes what --rdzv says]
    #[arg(long, value_name = "TOKEN")]
    pub(super) run_id: Option<String>,
    /// Start ranks on the hosts of this file over ssh; lines: `host slots=4`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["nproc_per_node", "nnodes", "node_rank"])]
    pub(super) hostfile: Option<PathBuf>,
    /// Command that runs a command on a host of the host file: `COMMAND HOST PROGRAM ARGS`
    /// [default: ssh, which must not ask for anything]
    #[arg(long, value_name = "COMMAND")]
    pub(super) ssh: Option<String>,
    /// Set a variable for all ranks; without a value, as it is here
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,
    /// Also write each rank's output to rank-N.out and rank-N.err in this folder
    #[arg(long, value_name = "DIR")]
    pub(super) log_dir: Option<PathBuf>,
    /// Time that ranks have to end after a signal or a failure, before they are killed
    #[arg(long, value_name = "SECS", default_value_t = 10.0)]
    pub(super) grace_secs: f64,
    /// Give a host of the host file up after this time without a word from it, and it this one [default: 60]
    #[arg(long, value_name = "SECS")]
    pub(super) silence_secs: Option<f64>,
    /// Print what would run where, and start nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// The program and its arguments
    #[arg(
        trailing_var_arg = true,
        required = true,
        value_name = "PROGRAM",
        allow_hyphen_values = true
    )]
    pub(super) program: Vec<String>,
}
