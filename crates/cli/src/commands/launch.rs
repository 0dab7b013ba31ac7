//! Flags of `candle-train launch`.

use std::path::PathBuf;

use candle_launch::WaitNotices;
use candle_launch::launcher::{LaunchConfig, NodeRange, RendezvousAddress};
use candle_train_run::whole;

/// Start the ranks of a run, on this host or on several, and end them together
#[derive(Debug, clap::Args)]
pub(crate) struct LaunchArgs {
    /// Number of ranks to start on this host
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..), required_unless_present = "hostfile")]
    nproc_per_node: Option<usize>,
    /// Number of hosts, if this command is run once on each, or MIN:MAX: hosts may leave, and come while the ranks run, which are then
    /// started again. The launchers need a secret: a file that only you can read, which CANDLE_TRAIN_RUN_TOKEN_FILE names. With a host
    /// file: how many of its hosts there have to be [default: 1; all]
    #[arg(long, value_name = "HOSTS|MIN:MAX")]
    nnodes: Option<NodeRange>,
    /// Where the ranks meet, or the launchers: a name of the first host, whose launcher leads the others, and a port that is free there
    #[arg(long, value_name = "HOST:PORT")]
    rdzv: Option<RendezvousAddress>,
    /// Start ranks on the hosts of this file over ssh; lines: `host slots=4`
    #[arg(long, value_name = "FILE", conflicts_with = "nproc_per_node")]
    hostfile: Option<PathBuf>,
    /// Command that runs a command on a host of the host file: `COMMAND HOST PROGRAM ARGS`
    /// [default: ssh, which must not ask for anything]
    #[arg(long, value_name = "COMMAND")]
    ssh: Option<String>,
    /// Command of an MPI library that starts ranks: `COMMAND -n N PROGRAM ARGS`. Without it programs that want to be started so are, by
    /// mpirun, or srun where Slurm runs a batch script [default: mpirun]
    #[arg(long, value_name = "COMMAND")]
    mpirun: Option<String>,
    /// Set a variable for all ranks; without a value, as it is here
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Also write each rank's output to rank-N.out and rank-N.err in this folder
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Leave the others running when ranks fail, up to so many and not rank 0: for programs that go on without them, as an asynchronous
    /// parameter server does without workers
    #[arg(long, value_name = "RANKS", default_value_t = 0, value_parser = whole::<usize>(0..))]
    may_lose: usize,
    /// Start all ranks again after a failure, up to so many times. They have the number in CANDLE_TRAIN_RESTART_COUNT; finetune and
    /// pretrain then go on from the newest checkpoint in --save-dir, if there is one
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole::<usize>(0..))]
    max_restarts: usize,
    /// Time that ranks have to end, before they are killed [default: 10 after a failure, 300 after a signal]
    #[arg(long, value_name = "SECS")]
    grace_secs: Option<f64>,
    /// Give a host of the host file, or one that this launcher leads, up after this time without a word from it, and it this one [default: 60]
    #[arg(long, value_name = "SECS")]
    silence_secs: Option<f64>,
    /// Take a secret of fewer than 16 bytes, which who listens in place of the launcher that leads could guess by trying words
    #[arg(long)]
    short_secret: bool,
    /// Print what would run where, and start nothing
    #[arg(long)]
    dry_run: bool,
    /// The program and its arguments
    #[arg(
        trailing_var_arg = true,
        required = true,
        value_name = "PROGRAM",
        allow_hyphen_values = true
    )]
    program: Vec<String>,
}

impl From<LaunchArgs> for LaunchConfig {
    fn from(args: LaunchArgs) -> Self {
        Self {
            nproc_per_node: args.nproc_per_node,
            nnodes: args.nnodes,
            rdzv: args.rdzv,
            hostfile: args.hostfile,
            ssh: args.ssh,
            mpirun: args.mpirun,
            env: args.env,
            log_dir: args.log_dir,
            may_lose: args.may_lose,
            max_restarts: args.max_restarts,
            grace_secs: args.grace_secs,
            silence_secs: args.silence_secs,
            wait_notices: WaitNotices::default(),
            short_secret: args.short_secret,
            dry_run: args.dry_run,
            program: args.program,
        }
    }
}
