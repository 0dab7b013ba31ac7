//! Starting ranks by an MPI library's own launcher, which alone can tell them how to reach each other by MPI.
//!
//! It starts an agent for each rank, which calls the front and starts the rank as a process below itself.

use std::process::Command;

use super::config::LaunchConfig;
use super::host::Host;
use super::program::{self, own_program};
use super::rank_variables::FOREIGN;
use crate::{Error, Result, Secret};

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

/// An MPI library's launcher.
#[derive(Debug)]
pub(super) struct Mpi {
    /// The command, but for the last word: where agents call the front.
    pub(super) words: Vec<String>,
    /// The command that runs a command on another host.
    via: String,
}

impl Mpi {
    /// The one that starts the agents of all ranks on these hosts.
    ///
    /// # Errors
    /// It is not installed, or cannot be told how to reach the other hosts.
    pub(super) fn new(config: &LaunchConfig, hosts: &[Host], via: &[String]) -> Result<Self> {
        let is_all_here = hosts.iter().all(|host| host.is_here);
        let is_batch = config.hostfile.is_none() && is_all_here;
        let is_batch = is_batch && std::env::var_os("SLURM_JOB_ID").is_some();
        let default = if is_batch { SRUN } else { MPIRUN };
        let command = config.mpirun.as_deref().unwrap_or(default);
        let mut words: Vec<String> = command.split_whitespace().map(String::from).collect();
        let Some(launcher) = words.first() else {
            return Err(Error::Launch(
                "--mpirun: expected a command, got nothing".to_string(),
            ));
        };
        let folder = std::env::current_dir().unwrap_or_default();
        program::find(launcher, &folder).map_err(|error| {
            let error = error.to_string();
            let why = error.lines().next().unwrap_or_default();
            Error::Launch(format!(
                "the ranks speak MPI, and {why}\n\
                 hint: install the MPI library that the program was built with (Debian: apt-get install openmpi-bin), or say how it starts \
                 ranks: --mpirun COMMAND"
            ))
        })?;
        let num_ranks: usize = hosts.iter().map(|host| host.num_ranks).sum();
        words.extend(["-n".to_string(), num_ranks.to_string()]);
        if !is_all_here {
            check_via(via)?;
            let of_host = |host: &Host| format!("{}:{}", host.name, host.num_ranks);
            let hosts: Vec<_> = hosts.iter().map(of_host).collect();
            words.extend(["--host".to_string(), hosts.join(",")]);
        }
        words.extend([own_program(), "agent".to_string()]);
        Ok(Self {
            words,
            via: via.join(" "),
        })
    }

    /// The command that starts agents which call the front at this address; they are told the secret if it is one for this run only.
    pub(super) fn command(&self, front: &str, secret: Option<&Secret>) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg(front);
        let via = [
            ("OMPI_MCA_plm_rsh_agent", self.via.as_str()),
            ("PRTE_MCA_plm_ssh_agent", &self.via),
        ];
        // Passed on to other hosts by its name; MPICH and Slurm pass on all there is.
        let passed_on = ("OMPI_MCA_mca_base_env_list", "CANDLE_TRAIN_RUN_TOKEN");
        let passed_on = secret.map(|_| passed_on);
        for (name, value) in SETTINGS.into_iter().chain(via).chain(passed_on) {
            if std::env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        if let Some(secret) = secret {
            command.env("CANDLE_TRAIN_RUN_TOKEN", secret.as_str());
        }
        for name in FOREIGN.into_iter().chain(["RANK", "WORLD_SIZE"]) {
            command.env_remove(name);
        }
        command
    }
}

/// An error if mpirun would read the command that runs commands on other hosts in another way.
fn check_via(via: &[String]) -> Result<()> {
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
    Ok(())
}
