//! Where the ranks of a run meet, and the secret by which they know each other.

use std::os::unix::fs::PermissionsExt;

use super::identity::{Identity, StartedBy};
use super::slurm_list;
use super::variables::Variables;
use crate::{Error, Result, Secret};

/// Ports below those that systems hand out by themselves, so that a port derived from a job is probably free.
const DERIVED_PORTS: std::ops::Range<u16> = 20000..32000;

/// The run's secret, and the file that has it.
const SECRET: &str = "CANDLE_TRAIN_RUN_TOKEN";
const SECRET_FILE: &str = "CANDLE_TRAIN_RUN_TOKEN_FILE";
/// Set to 1 if a secret is meant to be short.
pub(crate) const SHORT_SECRET: &str = "CANDLE_TRAIN_SHORT_SECRET";

/// Address and port of rank 0, as far as known, and the run's secret.
#[derive(Debug, Clone)]
pub(super) struct MeetingPoint {
    pub(super) secret: Secret,
    /// It follows from what others may know.
    pub(super) is_guessable: bool,
    pub(super) address: Option<String>,
    pub(super) port: Option<u16>,
}

impl MeetingPoint {
    pub(super) fn read(vars: &Variables, identity: &Identity) -> Result<Self> {
        let job = job_name(vars, identity.started_by);
        // A process that is alone meets nobody, so what others have set for themselves may be anything: Kubernetes sets the port of a service
        // called "master" to a URL.
        let is_alone = identity.world_size == 1;
        let given = given_secret(vars, false);
        let given = given.or_else(|error| is_alone.then_some(None).ok_or(error))?;
        let address =
            address(vars, identity).or_else(|error| is_alone.then_some(None).ok_or(error))?;
        let port = port(vars, job.as_deref());
        let port = port.or_else(|error| is_alone.then_some(None).ok_or(error))?;
        let is_guessable = given.is_none();
        // Without a job's number two runs differ at least in where they meet.
        let secret = match (given.or(job.map(Secret::from)), &address, port) {
            (Some(secret), _, _) => secret,
            (None, Some(address), Some(port)) => format!("{address}:{port}").into(),
            _ => "".into(),
        };
        Ok(Self {
            secret,
            is_guessable,
            address,
            port,
        })
    }
}

/// The secret that the user or the launcher has given, if one is; a short one only if that or the environment says that it is meant.
///
/// # Errors
/// It is empty or short; its file cannot be read, or others can read it too.
pub(super) fn given_secret(vars: &Variables, is_short_meant: bool) -> Result<Option<Secret>> {
    let (variable, secret) = match (vars.even_empty(SECRET), vars.even_empty(SECRET_FILE)) {
        (Some(secret), _) => (SECRET.to_string(), secret),
        (None, Some(path)) => (format!("{SECRET_FILE}={path}"), read_secret(&path)?),
        (None, None) => return Ok(None),
    };
    let secret = Secret::from(secret.trim());
    let num_bytes = secret.as_str().len();
    if num_bytes == 0 {
        let what = format!("{variable}: expected a secret, got nothing");
        return Err(Error::Environment(what));
    }
    let is_short_meant = is_short_meant || vars.get(SHORT_SECRET).as_deref() == Some("1");
    if secret.is_short() && !is_short_meant {
        return Err(Error::Environment(format!(
            "{variable}: expected a secret of at least 16 bytes, got {num_bytes}, which others may guess\n\
             hint: make one by `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, the same for all; if this one is meant, \
             `candle-train launch --short-secret`, or {SHORT_SECRET}=1 for ranks that something else starts"
        )));
    }
    Ok(Some(secret))
}

fn read_secret(path: &str) -> Result<String> {
    let problem = |what: String| Error::Environment(format!("{SECRET_FILE}: {what}: {path}"));
    let unreadable = |error| problem(format!("cannot read the run's secret ({error})"));
    let data = std::fs::metadata(path).map_err(unreadable)?;
    let mode = data.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(problem(format!(
            "others than its owner may use the file with the run's secret (mode {mode:o}); chmod 600 it and take another secret"
        )));
    }
    std::fs::read_to_string(path).map_err(unreadable)
}

/// What the launcher calls this run.
fn job_name(vars: &Variables, started_by: StartedBy) -> Option<String> {
    match started_by {
        StartedBy::Torchrun => {
            // The id is "none" unless the user gives one, so where the run meets belongs to its name.
            let names = [
                "TORCHELASTIC_RUN_ID",
                "TORCHELASTIC_RESTART_COUNT",
                "MASTER_ADDR",
                "MASTER_PORT",
            ];
            let parts: Vec<_> = names.iter().filter_map(|name| vars.get(name)).collect();
            Some(format!("torchrun.{}", parts.join(".")))
        }
        StartedBy::OpenMpi => {
            let job = vars.first(&["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"])?;
            Some(format!("ompi.{job}"))
        }
        StartedBy::Pmi | StartedBy::Slurm => {
            let (job, step) = (vars.get("SLURM_JOB_ID")?, vars.get("SLURM_STEP_ID")?);
            Some(format!("slurm.{job}.{step}"))
        }
        StartedBy::Nobody | StartedBy::CandleTrain | StartedBy::Variables => None,
    }
}

fn address(vars: &Variables, identity: &Identity) -> Result<Option<String>> {
    if let Some(address) = vars.get("MASTER_ADDR") {
        return Ok(Some(address));
    }
    if identity.local_world_size == identity.world_size {
        return Ok(Some("127.0.0.1".to_string()));
    }
    if matches!(identity.started_by, StartedBy::Slurm | StartedBy::Pmi) {
        for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
            if let Some(list) = vars.get(name) {
                return slurm_list::first_host(name, &list).map(Some);
            }
        }
    }
    Ok(None)
}

fn port(vars: &Variables, job: Option<&str>) -> Result<Option<u16>> {
    if let Some(port) = vars.port("CANDLE_TRAIN_MASTER_PORT")? {
        return Ok(Some(port));
    }
    let Some(port) = vars.port("MASTER_PORT")? else {
        return Ok(job.map(derived_port));
    };
    // torchrun's agent then listens on MASTER_PORT itself, for PyTorch's own store.
    if vars.get("TORCHELASTIC_USE_AGENT_STORE").as_deref() != Some("True") {
        return Ok(Some(port));
    }
    port.checked_add(1).map(Some).ok_or_else(|| {
        Error::Environment(format!(
            "MASTER_PORT={port} is torchrun's own and has no next port\n\
             hint: set CANDLE_TRAIN_MASTER_PORT to a free port of rank 0's host"
        ))
    })
}

/// The same port on all ranks of a job, and probably another one for another job (FNV-1a).
fn derived_port(job: &str) -> u16 {
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    DERIVED_PORTS.start + (hash % DERIVED_PORTS.len() as u64) as u16
}
