//! How this process takes part in a run.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::time::Duration;

use candle_core::{Device, Result};
use candle_launch::{ControlConfig, Fingerprint, RankEnv, StartedBy};

use crate::cores::keep_candle_from_threads;
use crate::error::argument;
use crate::local::ABORT_AFTER;
use crate::{Backend, Degrees, HalfSums};

/// How this process takes part in a run; see [`launch::run`](crate::launch::run).
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// What moves tensors between ranks.
    pub backend: Backend,
    /// Who this process is.
    pub env: RankEnv,
    /// The ranks' places.
    pub degrees: Degrees,
    /// With threads: the devices that they take in turn, none for the CPU. With processes: this rank's device.
    pub devices: Vec<Device>,
    /// How long a rank may wait for the others in one operation before the run ends with an error. Default: 10 minutes.
    pub deadline: Duration,
    /// With threads: how long the others may take to end after a rank failed, before the process ends; see
    /// [`LocalConfig::abort_after`](crate::LocalConfig::abort_after). Processes end a second after they hear of it. Default: 10
    /// seconds.
    pub abort_after: Duration,
    /// How long a rank that is a process may say nothing before it is taken for dead; a second at least. Default: 6 seconds.
    pub rank_timeout: Duration,
    /// How NCCL adds bf16 and f16. Default: in f32.
    pub half_sums: HalfSums,
    /// Threads on which a rank computes. Default: as the backend divides the cores.
    pub threads_per_rank: Option<usize>,
    /// Whether ranks that are processes compare each collective by way of rank 0 before it starts, so that no rank starts one
    /// before all have called it. Threads and MPI find ranks that call different things by themselves, NCCL does not.
    /// To start a collective is then to wait for all ranks of its group, so ranks that start it before and after a message
    /// between them wait for each other for ever. Default: no.
    pub check_collectives: bool,
    /// The exit code of a rank whose failure MPI tells the others; it may be changed while the rank runs. Default: 1.
    pub failure_exit_code: Arc<AtomicU8>,
    /// What ranks that are processes compare when they meet. Default: nothing.
    pub fingerprint: Fingerprint,
}

impl RunConfig {
    /// More ranks than this as threads of one process are a slip of the keyboard.
    pub const MAX_THREADS: usize = 1024;

    /// The defaults.
    ///
    /// # Errors
    /// The environment's number of processes is not what the degrees and the backend need, or this build does not have the
    /// backend.
    pub fn new(
        backend: Backend,
        env: RankEnv,
        degrees: Degrees,
        devices: Vec<Device>,
    ) -> Result<Self> {
        let config = Self {
            backend,
            devices,
            ..Self::with_defaults(env, degrees)
        };
        config.check()?;
        let num_here = match backend {
            Backend::Local => degrees.world_size().unwrap_or(1),
            _ => config.env.local_world_size(),
        };
        if num_here > 1 && config.devices.iter().all(Device::is_cpu) {
            // As early as can be: later this process may have more threads.
            keep_candle_from_threads();
        }
        Ok(config)
    }

    /// The defaults for ranks that have nothing between them but [messages](crate::launch::mailboxes), on the CPU: threads, or what a launcher has
    /// started.
    pub fn of_mailboxes(env: RankEnv, degrees: Degrees) -> Self {
        // As early as can be: later this process may have more threads.
        keep_candle_from_threads();
        Self::with_defaults(env, degrees)
    }

    fn with_defaults(env: RankEnv, degrees: Degrees) -> Self {
        Self {
            backend: Backend::Local,
            env,
            degrees,
            devices: vec![Device::Cpu],
            deadline: Duration::from_secs(600),
            abort_after: ABORT_AFTER,
            rank_timeout: Duration::from_secs(6),
            half_sums: HalfSums::default(),
            threads_per_rank: None,
            check_collectives: false,
            failure_exit_code: Arc::new(AtomicU8::new(1)),
            fingerprint: Fingerprint::default(),
        }
    }

    /// Whether rank 0 is in this process: the one that prints, and writes files.
    pub fn is_first(&self) -> bool {
        self.env.rank() == 0
    }

    /// How the ranks run, in words.
    pub fn describe(&self) -> String {
        let is_one = self.degrees.world_size() == Some(1);
        match (self.backend, is_one) {
            (Backend::Local, _) if self.env.world_size() > 1 => "as processes".to_string(),
            (Backend::Local, true) => "as a thread".to_string(),
            (Backend::Local, false) => "as threads".to_string(),
            (backend, true) => format!("as a process over {backend}"),
            (backend, false) => format!("as processes over {backend}"),
        }
    }

    /// How this process joins the control plane at `master`.
    pub(crate) fn control(&self, master: (String, u16)) -> ControlConfig {
        ControlConfig {
            fingerprint: self.fingerprint.clone().into_entries(),
            deadline: self.deadline,
            rank_timeout: self.rank_timeout,
            ..ControlConfig::at(&self.env, master)
        }
    }

    /// An error unless the fields fit each other and this build.
    pub(crate) fn check(&self) -> Result<()> {
        let (backend, degrees, num_processes) = (self.backend, self.degrees, self.env.world_size());
        let started_by = self.env.started_by();
        if !backend.is_built() {
            return Err(self.not_built());
        }
        let message = match (backend, degrees.world_size()) {
            (_, Some(0)) => {
                format!("{degrees} is not a number of ranks: every degree must be at least 1")
            }
            (Backend::Local, ranks) if ranks.is_none_or(|ranks| ranks > Self::MAX_THREADS) => {
                format!(
                    "{degrees} is more than the {} ranks that may be threads of one process\n\
                 hint: with --backend mpi or nccl each rank is a process, of which there may be more",
                    Self::MAX_THREADS
                )
            }
            (Backend::Local, _) if num_processes > 1 => format!(
                "the backend local runs all ranks as threads of one process, but {started_by} started {num_processes} \
                 processes, each of which would train by itself\nhint: --backend mpi or nccl, or start one process"
            ),
            (Backend::Local, _) => return Ok(()),
            (_, Some(ranks)) if ranks == num_processes => return Ok(()),
            (_, ranks) => {
                let ranks =
                    ranks.map_or("too many to count".into(), |ranks| format!("{ranks} ranks"));
                let processes = match started_by {
                    StartedBy::Nobody => {
                        "this process is alone: no launcher started it".to_string()
                    }
                    _ => format!("{started_by} started {num_processes} processes"),
                };
                format!(
                    "{degrees} = {ranks}, but {processes}\nhint: with the backend {backend} each rank is a process of its own"
                )
            }
        };
        Err(argument(message))
    }

    /// The error about a backend that this build does not have.
    pub(crate) fn not_built(&self) -> candle_core::Error {
        let (backend, num_processes) = (self.backend, self.env.world_size());
        let why = match num_processes {
            1 => String::new(),
            _ => format!(
                ", and this is one of {num_processes} processes, started by {}",
                self.env.started_by()
            ),
        };
        let hint = match backend {
            Backend::Mpi => {
                "install an MPI library (Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev) and build with `--features mpi`, \
                 for the command: cargo install --path crates/cli --features mpi"
            }
            _ => "build with `--features nccl`",
        };
        argument(format!(
            "the backend {backend} is not in this build{why}\nhint: {hint}"
        ))
    }
}
