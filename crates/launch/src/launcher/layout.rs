//! Which ranks run where, from its configuration: everything that is decided before anything is started.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::Duration;

use super::config::LaunchConfig;
use super::host::{Host, is_loopback};
use super::host_plan::HostPlan;
use super::mpi::Mpi;
use super::program::own_program;
use super::rank_variables;
use super::rendezvous_address::RendezvousAddress;
use crate::secret::random_bytes;
use crate::{Error, Result, Secret, WaitNotices};

/// A silence this long means that a link is cut, unless the user says otherwise; at least some of the words that both
/// sides send every second must fit in.
const SILENCE_SECS: f64 = 60.0;
const MIN_SILENCE_SECS: f64 = 3.0;
/// After a failure there is nothing that ranks could still do together.
const GRACE_AFTER_FAILURE_SECS: f64 = 10.0;
/// After a signal they finish their step and save.
const GRACE_AFTER_SIGNAL_SECS: f64 = 300.0;
/// How ranks are started on other hosts, unless `--ssh` says otherwise: nobody can type a password, and no master of a
/// shared connection is left behind.
const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ControlMaster=no -T";
/// Below the ports that systems hand out by themselves, so that a free one here is probably free on another host.
const PORTS: std::ops::Range<u16> = 20000..32000;

/// A run: its hosts, and where their ranks meet.
#[derive(Debug)]
pub(super) struct Layout {
    /// What each agent has to run: one on each host, or for each rank where MPI starts them.
    pub(super) hosts: Vec<HostPlan>,
    pub(super) world_size: usize,
    pub(super) meeting: RendezvousAddress,
    /// What starts the agents, if ranks are started through MPI.
    pub(super) mpi: Option<Mpi>,
    /// Whether the port is another one at each start.
    pub(super) random_port: bool,
    /// So many ranks may fail while the others go on.
    pub(super) may_lose: usize,
    /// What ranks have to end after a failure, and after a signal to the launcher.
    pub(super) grace_after_failure: Duration,
    pub(super) grace_after_signal: Duration,
    pub(super) wait_notices: WaitNotices,
}

impl Layout {
    /// Of the ranks that are started on these hosts after `num_restarts` earlier starts; each time they meet at another place.
    ///
    /// # Errors
    /// Options that contradict each other or this host, in words.
    pub(super) fn new(
        config: &LaunchConfig,
        hosts: &[Host],
        num_restarts: usize,
        through_mpi: bool,
    ) -> Result<Self> {
        let (meeting, random_port) = meeting(config, hosts)?;
        let secret = match through_mpi || config.is_led() {
            // They give themselves one; or each host has been told.
            true => None,
            false => Some(Secret::random()?),
        };
        let given = rank_variables::given(&config.env)?;
        let (program, args) = config
            .program
            .split_first()
            .ok_or_else(|| Error::Launch("no program to run".to_string()))?;
        let via = via(config)?;
        let mpi = through_mpi.then(|| Mpi::new(config, hosts, &via));
        let grace_ms = |default| milliseconds("--grace-secs", config.grace_secs, default, 0.0);
        let after_failure = grace_ms(GRACE_AFTER_FAILURE_SECS)?;
        let after_signal = grace_ms(GRACE_AFTER_SIGNAL_SECS)?;
        let silence_ms = silence_ms(config)?;
        let folder = current_folder()?;
        let world_size = hosts.iter().map(|host| host.num_ranks).sum::<usize>();
        let mut plans = Vec::new();
        let mut first_rank = 0;
        for (node_rank, host) in hosts.iter().enumerate() {
            let own = [
                ("WORLD_SIZE", world_size.to_string()),
                ("LOCAL_WORLD_SIZE", host.num_ranks.to_string()),
                ("MASTER_ADDR", meeting.host.clone()),
                ("MASTER_PORT", meeting.port.to_string()),
                ("GROUP_RANK", node_rank.to_string()),
                ("GROUP_WORLD_SIZE", hosts.len().to_string()),
                ("NODE_RANK", node_rank.to_string()),
                ("CANDLE_TRAIN_HOST", host.name.clone()),
                ("CANDLE_TRAIN_RESTART_COUNT", num_restarts.to_string()),
            ];
            let secret = secret.iter().map(|secret| secret.as_str().to_string());
            let secret = secret.map(|secret| ("CANDLE_TRAIN_RUN_TOKEN", secret));
            let own = own.into_iter().chain(secret);
            let plan = HostPlan {
                host: host.name.clone(),
                via: (!host.is_here).then(|| via.clone()),
                short_secret: config.short_secret,
                program: program.clone(),
                args: args.to_vec(),
                folder: folder.clone(),
                env: rank_variables::of_host(host.is_here, &given, own),
                first_rank,
                num_ranks: host.num_ranks,
                first_local_rank: 0,
                through_mpi,
                grace_ms: after_failure,
                silence_ms: (!host.is_here).then_some(silence_ms),
            };
            first_rank += host.num_ranks;
            match through_mpi {
                true => plans.extend(plan.by_rank()),
                false => plans.push(plan),
            }
        }
        Ok(Self {
            wait_notices: config.wait_notices,
            hosts: plans,
            world_size,
            meeting,
            mpi: mpi.transpose()?,
            random_port,
            may_lose: config.may_lose,
            grace_after_failure: Duration::from_millis(after_failure),
            grace_after_signal: Duration::from_millis(after_signal),
        })
    }
}

/// How long a launcher and what it leads on another host wait for a word of each other.
pub(super) fn silence_ms(config: &LaunchConfig) -> Result<u64> {
    let given = config.silence_secs;
    milliseconds("--silence-secs", given, SILENCE_SECS, MIN_SILENCE_SECS)
}

/// A time given in seconds, or its default.
fn milliseconds(option: &str, given: Option<f64>, default: f64, least: f64) -> Result<u64> {
    let secs = given.unwrap_or(default);
    if (least..=1e6).contains(&secs) {
        return Ok((secs * 1000.0) as u64);
    }
    Err(Error::Launch(format!(
        "{option}: expected a time from {least} to 1000000 seconds, got {secs}"
    )))
}

/// The command that runs commands on other hosts, if it is wanted for any: ssh, or what reaches launchers that have called.
fn via(config: &LaunchConfig) -> Result<Vec<String>> {
    let is_silence_alone = config.silence_secs.is_some() && !config.is_led();
    let given = [
        ("--ssh", config.ssh.is_some()),
        ("--silence-secs", is_silence_alone),
    ];
    if let (None, Some((option, _))) = (&config.hostfile, given.iter().find(|(_, given)| *given)) {
        return Err(Error::Launch(format!(
            "{option} is for the hosts of a --hostfile, which is not given"
        )));
    }
    if let (true, Some(front)) = (config.is_led(), &config.rdzv) {
        let (host, port) = (front.host.clone(), front.port.to_string());
        return Ok(vec![own_program(), "reach".to_string(), host, port]);
    }
    let command = config.ssh.as_deref().unwrap_or(SSH);
    let words: Vec<String> = command.split_whitespace().map(String::from).collect();
    match words.is_empty() {
        true => Err(Error::Launch(
            "--ssh: expected a command, got nothing".to_string(),
        )),
        false => Ok(words),
    }
}

/// Where the ranks meet, and whether the port is a random one.
fn meeting(config: &LaunchConfig, hosts: &[Host]) -> Result<(RendezvousAddress, bool)> {
    let first = &hosts[0];
    let host = match &config.rdzv {
        // There the launchers meet.
        Some(meeting) if config.is_led() => meeting.host.clone(),
        Some(meeting) => {
            if first.is_here {
                check_free(meeting)?;
            }
            return Ok((meeting.clone(), false));
        }
        None if hosts.len() == 1 && first.is_here => "127.0.0.1".to_string(),
        None if hosts.len() > 1 && is_loopback(&first.name) => {
            return Err(Error::Launch(format!(
                "the ranks would meet on the first host, but its name {:?} means another machine on every host\n\
                 hint: write the name under which the others reach it in the host file, or give --rdzv HOST:PORT",
                first.name
            )));
        }
        None => first.name.clone(),
    };
    let port = free_port()?;
    Ok((RendezvousAddress { host, port }, true))
}

/// An error if the address is not known here, on the host of rank 0, or if somebody listens there already.
fn check_free(meeting: &RendezvousAddress) -> Result<()> {
    // Other errors may be due to an address that is this host's only seen from outside.
    let is_taken = |error: std::io::Error| error.kind() == ErrorKind::AddrInUse;
    let mut addresses = meeting.resolve()?.into_iter();
    match addresses.any(|address| TcpListener::bind(address).is_err_and(is_taken)) {
        false => Ok(()),
        true => Err(Error::Launch(format!(
            "--rdzv: port {} of {} is taken\nhint: choose another one, or end the run that uses it",
            meeting.port, meeting.host
        ))),
    }
}

/// A random port that is free here.
fn free_port() -> Result<u16> {
    for _ in 0..100 {
        let random =
            random_bytes().map_err(|error| Error::Launch(format!("no random port: {error}")))?;
        let port = PORTS.start + u16::from_le_bytes(random) % PORTS.len() as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(Error::Launch("no free port on 127.0.0.1".to_string()))
}

fn current_folder() -> Result<String> {
    let folder = std::env::current_dir()
        .map_err(|error| Error::Launch(format!("cannot tell the current folder: {error}")))?;
    folder.into_os_string().into_string().map_err(|folder| {
        Error::Launch(format!("the current folder's name {folder:?} is not UTF-8"))
    })
}
