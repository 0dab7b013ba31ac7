//! What a launcher is told.

// The help of a flag has brackets that are no links.
#![allow(rustdoc::broken_intra_doc_links)]

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
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct LaunchConfig {
    /// Number of ranks to start on this host
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = at_least(1), required_unless_present = "hostfile"))]
    pub nproc_per_node: Option<usize>,
    /// Number of hosts, if this command is run once on each, or MIN:MAX: hosts may leave, and come while the ranks run, which are then
    /// started again. The launchers need a secret: a file that only you can read, which CANDLE_TRAIN_RUN_TOKEN_FILE names. With a host
    /// file: how many of its hosts there have to be [default: 1; all]
    #[cfg_attr(feature = "clap", arg(long, value_name = "HOSTS|MIN:MAX"))]
    pub nnodes: Option<NodeRange>,
    /// Where the ranks meet, or the launchers: a name of the first host, whose launcher leads the others, and a port that is free there
    #[cfg_attr(feature = "clap", arg(long, value_name = "HOST:PORT"))]
    pub rdzv: Option<RendezvousAddress>,
    /// Start ranks on the hosts of this file over ssh; lines: `host slots=4`
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "FILE", conflicts_with = "nproc_per_node")
    )]
    pub hostfile: Option<PathBuf>,
    /// Command that runs a command on a host of the host file: `COMMAND HOST PROGRAM ARGS`
    /// [default: ssh, which must not ask for anything]
    #[cfg_attr(feature = "clap", arg(long, value_name = "COMMAND"))]
    pub ssh: Option<String>,
    /// Command of an MPI library that starts ranks: `COMMAND -n N PROGRAM ARGS`. Without it programs that want to be started so are, by
    /// mpirun, or srun where Slurm runs a batch script [default: mpirun]
    #[cfg_attr(feature = "clap", arg(long, value_name = "COMMAND"))]
    pub mpirun: Option<String>,
    /// Set a variable for all ranks; without a value, as it is here
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME[=VALUE]"))]
    pub env: Vec<String>,
    /// Also write each rank's output to rank-N.out and rank-N.err in this folder
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub log_dir: Option<PathBuf>,
    /// Leave the others running when ranks fail, up to so many and not rank 0: for programs that go on without them, as an asynchronous
    /// parameter server does without workers
    #[cfg_attr(feature = "clap", arg(long, value_name = "RANKS", default_value_t = 0, value_parser = at_least(0)))]
    pub may_lose: usize,
    /// Start all ranks again after a failure, up to so many times. They have the number in CANDLE_TRAIN_RESTART_COUNT; finetune and
    /// pretrain then go on from the newest checkpoint in --save-dir, if there is one
    #[cfg_attr(feature = "clap", arg(long, value_name = "K", default_value_t = 0, value_parser = at_least(0)))]
    pub max_restarts: usize,
    /// Time that ranks have to end, before they are killed [default: 10 after a failure, 300 after a signal]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECS"))]
    pub grace_secs: Option<f64>,
    /// Give a host of the host file, or one that this launcher leads, up after this time without a word from it, and it this one [default: 60]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECS"))]
    pub silence_secs: Option<f64>,
    /// When this launcher says for which hosts it waits.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub wait_notices: WaitNotices,
    /// Take a secret of fewer than 16 bytes, which who listens in place of the launcher that leads could guess by trying words
    #[cfg_attr(feature = "clap", arg(long))]
    pub short_secret: bool,
    /// Print what would run where, and start nothing
    #[cfg_attr(feature = "clap", arg(long))]
    pub dry_run: bool,
    /// The program and its arguments
    #[cfg_attr(
        feature = "clap",
        arg(
            trailing_var_arg = true,
            required = true,
            value_name = "PROGRAM",
            allow_hyphen_values = true
        )
    )]
    pub program: Vec<String>,
}

/// What reads a number of a flag.
#[cfg(feature = "clap")]
fn at_least(least: usize) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    move |text| {
        let number = text.parse().ok().filter(|number| *number >= least);
        number.ok_or_else(|| format!("expected a whole number >= {least}"))
    }
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
