//! Ranks as processes: a test starts itself once more, on each rank, under mpirun.

use std::env;
use std::process::{Command, Output};
use std::time::Duration;

use candle_comm::{MpiConfig, ProcessGroup, launch};
use candle_core::Result;

use crate::conformance::Launch;

/// Set, to the number of ranks, where a test is one of the ranks.
const ROLE: &str = "CANDLE_COMM_TEST_RANKS";

/// Ranks as processes of the run that this process is part of.
pub struct Mpi<'a> {
    pub world: &'a ProcessGroup,
    pub world_sizes: [usize; 1],
}

impl<'a> Mpi<'a> {
    pub fn new(world: &'a ProcessGroup) -> Self {
        let world_sizes = [world.world_size()];
        Self { world, world_sizes }
    }
}

impl Launch for Mpi<'_> {
    fn world_sizes(&self) -> &[usize] {
        &self.world_sizes
    }

    /// On the first `world_size` ranks; nothing if there are fewer.
    fn run<T: Send>(
        &self,
        world_size: usize,
        run: impl Fn(ProcessGroup) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        if world_size > self.world.world_size() {
            return Ok(Vec::new());
        }
        let takes_part = self.world.rank() < world_size;
        let group = self
            .world
            .split(usize::from(!takes_part), self.world.rank())?;
        match takes_part {
            true => Ok(vec![run(group)?]),
            false => Ok(Vec::new()),
        }
    }
}

/// Runs `rank_main` on `num_ranks` ranks of the test named `test`, and returns what they printed and how they ended; `None`
/// on the ranks themselves, and without mpirun, which it says.
pub fn output(
    test: &str,
    num_ranks: usize,
    deadline: Duration,
    rank_main: impl FnOnce(ProcessGroup) -> Result<()> + Send,
) -> Option<Output> {
    let config = MpiConfig {
        deadline,
        ..config()
    };
    output_with(test, num_ranks, config, rank_main)
}

/// Ranks of one thread.
pub fn config() -> MpiConfig {
    MpiConfig {
        deadline: Duration::from_secs(180),
        threads_per_rank: Some(1),
        ..MpiConfig::default()
    }
}

/// As [`output`], of ranks that are configured like this.
pub fn output_with(
    test: &str,
    num_ranks: usize,
    config: MpiConfig,
    rank_main: impl FnOnce(ProcessGroup) -> Result<()> + Send,
) -> Option<Output> {
    if is_rank(num_ranks, config, rank_main) {
        return None;
    }
    let Some(mut mpirun) = mpirun(num_ranks) else {
        eprintln!("SKIPPED: {test}: there is no mpirun");
        return None;
    };
    let mpirun = mpirun
        .arg(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, num_ranks.to_string());
    Some(mpirun.output().unwrap())
}

/// As [`output`], on one rank that no mpirun has started and whose environment says that there are four.
pub fn output_alone(test: &str) -> Option<Output> {
    if is_rank(1, config(), |_| Ok(())) {
        return None;
    }
    if mpirun(1).is_none() {
        eprintln!("SKIPPED: {test}: there is no mpirun");
        return None;
    }
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, "1")
        .env("WORLD_SIZE", "4")
        .output();
    Some(output.unwrap())
}

/// Whether this process is a rank of a test; if it is one of `num_ranks`, it has run `rank_main`.
fn is_rank(
    num_ranks: usize,
    config: MpiConfig,
    rank_main: impl FnOnce(ProcessGroup) -> Result<()> + Send,
) -> bool {
    let Ok(role) = env::var(ROLE) else {
        return false;
    };
    if role == num_ranks.to_string() {
        launch::mpi(config, rank_main).unwrap();
    }
    true
}

/// As [`output`], where all ranks must succeed.
pub fn run(
    test: &str,
    num_ranks: usize,
    rank_main: impl FnOnce(ProcessGroup) -> Result<()> + Send,
) {
    run_with(test, num_ranks, config(), rank_main);
}

/// As [`run`], where so many ranks in a row take themselves for those of one host.
pub fn run_on_hosts(
    test: &str,
    (num_ranks, ranks_per_host): (usize, usize),
    rank_main: impl FnOnce(ProcessGroup) -> Result<()> + Send,
) {
    let config = MpiConfig {
        ranks_per_host: Some(ranks_per_host),
        ..config()
    };
    run_with(test, num_ranks, config, rank_main);
}

fn run_with(
    test: &str,
    num_ranks: usize,
    config: MpiConfig,
    rank_main: impl FnOnce(ProcessGroup) -> Result<()> + Send,
) {
    let Some(output) = output_with(test, num_ranks, config, rank_main) else {
        return;
    };
    let said = said(&output);
    assert!(
        output.status.success(),
        "{test} on {num_ranks} ranks:\n{said}"
    );
    // Every rank has ended well, and at least one has not merely found no test of this name. Lines of several ranks may run
    // into each other, so they cannot be counted.
    assert!(said.contains("1 passed"), "{said}");
}

/// Everything that the ranks printed.
pub fn said(output: &Output) -> String {
    let (stdout, stderr) = (&output.stdout, &output.stderr);
    format!(
        "{}{}",
        String::from_utf8_lossy(stdout),
        String::from_utf8_lossy(stderr)
    )
}

/// The command that starts ranks, with more of them than there are cores if need be.
fn mpirun(num_ranks: usize) -> Option<Command> {
    let version = Command::new("mpirun").arg("--version").output().ok()?;
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &num_ranks.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        mpirun.args([
            "--allow-run-as-root",
            "--oversubscribe",
            "--bind-to",
            "none",
        ]);
    }
    Some(mpirun)
}
