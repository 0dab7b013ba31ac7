//! Who this process is among the processes of its run, from the environment its launcher gave it.
//!
//! | launcher | variables |
//! |---|---|
//! | `candle-train launch`, `torchrun`, `accelerate launch` | RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT |
//! | Open MPI | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE |
//! | MPICH, Intel MPI | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS |
//! | Slurm | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST |
//!
//! The first row whose variables are set counts: the innermost launcher, since a Slurm step may hold the others. What MPI sets below
//! `candle-train launch` comes before that.
//! Ranks read these variables here; the MPI engine looks at some of them, to tell whether MPI has started it.

mod identity;
mod meeting_point;
mod slurm_list;
mod variables;

pub use identity::StartedBy;

use std::fmt;

use crate::{Error, Result, Secret};
use identity::Identity;
use meeting_point::MeetingPoint;
pub(crate) use meeting_point::SHORT_SECRET;
use variables::Variables;

/// How often ranks were started before, as we say it, and torchrun.
const RESTART_COUNTS: [&str; 2] = ["CANDLE_TRAIN_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"];

/// A rank's place in its run: its numbers, its host, where the ranks meet, and the secret that only they know.
#[derive(Debug, Clone)]
pub struct RankEnv {
    identity: Identity,
    meeting: MeetingPoint,
    host: String,
    num_restarts: usize,
}

impl RankEnv {
    /// Reads the environment of this process. Where no launcher set anything, it is rank 0 of 1.
    ///
    /// # Errors
    /// A launcher's variables are set in part, do not parse or contradict each other: the message names them.
    pub fn from_env() -> Result<Self> {
        let host = nix::unistd::gethostname()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_else(|_| "localhost".to_string());
        Self::from_lookup(&host, &variable)
    }

    /// The same from any source of variables, on a host of that name (`CANDLE_TRAIN_HOST` overrides it).
    ///
    /// # Errors
    /// As [`Self::from_env`].
    pub fn from_lookup(host: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let vars = Variables(lookup);
        let identity = Identity::read(&vars)?;
        let meeting = MeetingPoint::read(&vars, &identity)?;
        let num_restarts = match identity.started_by {
            StartedBy::Torchrun => vars.first_number(&RESTART_COUNTS)?,
            _ => vars.first_number(&RESTART_COUNTS[..1])?,
        };
        let own_host = vars.get("CANDLE_TRAIN_HOST");
        Ok(Self {
            identity,
            meeting,
            host: own_host.unwrap_or_else(|| host.to_string()),
            num_restarts: num_restarts.map_or(0, |(_, number)| number),
        })
    }

    /// This process's number in the run, from 0.
    pub fn rank(&self) -> usize {
        self.identity.rank
    }

    /// The number of ranks of the run.
    pub fn world_size(&self) -> usize {
        self.identity.world_size
    }

    /// This process's number among those of its host, from 0: the GPU to take.
    pub fn local_rank(&self) -> usize {
        self.identity.local_rank
    }

    /// The number of ranks on this host.
    pub fn local_world_size(&self) -> usize {
        self.identity.local_world_size
    }

    /// The name of this host, as the host file has it or as the system says.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Who started this process.
    pub fn started_by(&self) -> StartedBy {
        self.identity.started_by
    }

    /// A string that the ranks of one run share and other runs do not have, by which they know each other.
    ///
    /// A secret under `candle-train launch`, or where the variable CANDLE_TRAIN_RUN_TOKEN, the same on all ranks, gives one, or
    /// CANDLE_TRAIN_RUN_TOKEN_FILE names a file that has it. Else it is [guessable](Self::is_guessable).
    pub fn secret(&self) -> &Secret {
        &self.meeting.secret
    }

    /// Whether the secret only follows from what others may know too: a job's number, or where the ranks meet.
    pub fn is_guessable(&self) -> bool {
        self.meeting.is_guessable
    }

    /// How often the launcher has started the ranks before, because a start ended in a failure: the run should go on where it was.
    pub fn num_restarts(&self) -> usize {
        self.num_restarts
    }

    /// Host and port where rank 0 waits for the others.
    ///
    /// # Errors
    /// The launcher did not say where; the message names the variables to set.
    pub fn master(&self) -> Result<(String, u16)> {
        let missing = match (&self.meeting.address, self.meeting.port) {
            (Some(address), Some(port)) => return Ok((address.clone(), port)),
            (None, None) => "MASTER_ADDR and MASTER_PORT are not set",
            (None, _) => "MASTER_ADDR is not set",
            _ => "MASTER_PORT is not set",
        };
        let who = &self.identity;
        Err(Error::Environment(format!(
            "rank {} of {} on {} does not know where the ranks meet: {missing} (started by {})\n\
             hint: set both to a host name and a free port of rank 0's host, the same on all ranks; \
             `candle-train launch` and `torchrun` do, `mpirun` passes them on with -x (Open MPI) or -env (MPICH)",
            who.rank, who.world_size, self.host, who.started_by
        )))
    }
}

impl fmt::Display for RankEnv {
    /// `rank 3 of 4 on node2 (local rank 1 of 2), started by torchrun`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Identity {
            started_by,
            rank,
            world_size,
            local_rank,
            local_world_size,
        } = self.identity;
        write!(
            f,
            "rank {rank} of {world_size} on {} (local rank {local_rank} of {local_world_size}), started by {started_by}",
            self.host
        )
    }
}

/// The secret that the environment of this process has for a run, if it has one; a short one only if it says that it is meant, or the user
/// has told this process so.
///
/// # Errors
/// It is empty or short; its file cannot be read, or others can read it too.
pub(crate) fn given_secret(is_short_meant: bool) -> Result<Option<Secret>> {
    meeting_point::given_secret(&Variables(&variable), is_short_meant)
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
