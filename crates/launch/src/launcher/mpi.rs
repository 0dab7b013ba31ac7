//! Starting ranks by an MPI library's own launcher, which alone can tell them how to reach each other by MPI.
//!
//! It starts an agent for each rank, which calls the front and starts the rank as a process below itself.

use std::process::Command;

use super::agent_command::own_program;
use super::config::LaunchConfig;
use super::program;
use super::rank_variables::FOREIGN;
use super::shares::Share;
use crate::{Error, Result};

const MPIRUN: &str = "mpirun";
/// In the batch script or the shell of an allocation, where Slurm starts processes.
const SRUN: &str = "srun --mpi=pmix --nodes=1";

/// What Open MPI (4, then 5) needs to hear to start as many ranks as it is asked to, on all cores, as any user. What is set already stays.
const SETTINGS: [(&str, &str); 6] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// Whether the options say that ranks speak MPI; if not, they say it themselves
/// ([`NEEDS_MPI_EXIT_CODE`](super::NEEDS_MPI_EXIT_CODE)).
pub(super) fn is_asked(config: &LaunchConfig, num_ranks: usize) -> bool {
    let mut words = config.program.windows(2);
    let by_program = words.any(|pair| pair == ["--backend", "mpi"])
        || config.program.iter().any(|word| word == "--backend=mpi");
    (config.is_led() || num_ranks > 1) && (config.mpirun.is_some() || by_program)
}

/// The words that start the agents of all ranks, before the address at which these call the front.
///
/// # Errors
/// The launcher is not installed, or cannot be told how to reach the other hosts.
pub(super) fn words(
    config: &LaunchConfig,
    shares: &[Share],
    via: &[String],
) -> Result<Vec<String>> {
    let is_all_here = config.hostfile.is_none() && shares.iter().all(|share| share.is_here);
    let is_batch = is_all_here && std::env::var_os("SLURM_JOB_ID").is_some();
    let default = if is_batch { SRUN } else { MPIRUN };
    let command = config.mpirun.as_deref().unwrap_or(default);
    let mut words: Vec<String> = command.split_whitespace().map(String::from).collect();
    let Some(launcher) = words.first() else {
        return Err(Error::Launch(
            "--mpirun: expected a command, got nothing".to_string(),
        ));
    };
    let search_path = std::env::var("PATH").unwrap_or_default();
    let folder = std::env::current_dir().unwrap_or_default();
    program::find(launcher, &folder, &search_path).map_err(|error| {
        let error = error.to_string();
        let why = error.lines().next().unwrap_or_default();
        Error::Launch(format!(
            "the ranks speak MPI, and {why}\n\
             hint: install the MPI library that the program was built with (Debian: apt-get install openmpi-bin), or say how it starts \
             ranks: --mpirun COMMAND"
        ))
    })?;
    let num_ranks: usize = shares.iter().map(|share| share.num_ranks).sum();
    words.extend(["-n".to_string(), num_ranks.to_string()]);
    if shares.iter().any(|share| !share.is_here) {
        if via.iter().any(|word| word.contains(':')) {
            return Err(Error::Launch(format!(
                "mpirun takes a colon in what runs commands on other hosts for the end of a command: {:?}\n\
                 hint: names of hosts instead of IPv6 addresses, or an --ssh script",
                via.join(" ")
            )));
        }
        if via.iter().any(|word| word.contains(char::is_whitespace)) {
            return Err(Error::Launch(format!(
                "mpirun takes a blank in what runs commands on other hosts for the end of a word: {via:?}\n\
                 hint: install candle-train at a path without blanks"
            )));
        }
        let hosts = shares
            .iter()
            .map(|share| format!("{}:{}", share.name, share.num_ranks));
        words.extend(["--host".to_string(), hosts.collect::<Vec<_>>().join(",")]);
    }
    words.extend([own_program(), "agent".to_string()]);
    Ok(words)
}

/// The environment in which those words are run; `via` are the words that run a command on another host, which learn the
/// secret from this one or not.
pub(super) fn prepare(command: &mut Command, via: &str, passes_secret: bool) {
    let settings = [
        ("OMPI_MCA_plm_rsh_agent", via),
        ("PRTE_MCA_plm_ssh_agent", via),
    ];
    // Passed on to other hosts by its name; MPICH and Slurm pass on all there is.
    let secret = passes_secret.then_some(("OMPI_MCA_mca_base_env_list", "CANDLE_TRAIN_RUN_TOKEN"));
    for (name, value) in SETTINGS.into_iter().chain(settings).chain(secret) {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    for name in FOREIGN.into_iter().chain(["RANK", "WORLD_SIZE"]) {
        command.env_remove(name);
    }
}
