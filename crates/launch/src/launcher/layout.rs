//! Which ranks run where, from its configuration: everything that is decided before anything is started.

use std::net::{TcpListener, ToSocketAddrs};
use std::time::Duration;

use super::agent_command::own_program;
use super::config::LaunchConfig;
use super::host_plan::HostPlan;
use super::mpi;
use super::rank_variables;
use super::rendezvous_address::RendezvousAddress;
use super::shares::{Share, is_loopback};
use crate::secret::random_bytes;
use crate::{Error, Result, Secret};

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

/// A run: its hosts, and where their ranks meet.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) hosts: Vec<Host>,
    pub(super) world_size: usize,
    pub(super) meeting: RendezvousAddress,
    /// What starts the agents, if ranks are started through MPI: one for each, which is a host of its own here.
    pub(super) mpi: Option<Mpi>,
    /// Whether the port is another one at each start.
    pub(super) random_port: bool,
    /// So many ranks may fail while the others go on.
    pub(super) may_lose: usize,
    /// What ranks have to end after a failure, and after a signal to the launcher.
    pub(super) grace_after_failure: Duration,
    pub(super) grace_after_signal: Duration,
}

/// An MPI library's launcher.
#[derive(Debug)]
pub(super) struct Mpi {
    /// The command, but for the last word: where agents call the front.
    pub(super) words: Vec<String>,
    /// The command that runs a command on another host.
    pub(super) via: String,
    /// One of the other hosts, if there are any.
    pub(super) other_host: Option<String>,
}

/// A host and its ranks.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    /// The command that runs commands there; none for this host.
    pub(super) via: Option<Vec<String>>,
    pub(super) plan: HostPlan,
}

impl Layout {
    /// Of the ranks that are started on these hosts after `num_restarts` earlier starts; each time they meet at another place.
    ///
    /// # Errors
    /// Options that contradict each other or this host, in words.
    pub(super) fn new(
        config: &LaunchConfig,
        shares: Vec<Share>,
        num_restarts: usize,
        through_mpi: bool,
    ) -> Result<Self> {
        let world_size = shares.iter().map(|share| share.num_ranks).sum();
        let (meeting, random_port) = meeting(config, &shares)?;
        let secret = match through_mpi || config.is_led() {
            // They give themselves one; or each host has been told.
            true => None,
            false => Some(Secret::random()?),
        };
        let variables = rank_variables::Run {
            world_size,
            num_hosts: shares.len(),
            meeting: &meeting,
            secret: secret.as_ref(),
            num_restarts,
            given: &rank_variables::given(&config.env)?,
        };
        let folder = current_folder()?;
        let (program, args) = config
            .program
            .split_first()
            .ok_or_else(|| Error::Launch("no program to run".to_string()))?;
        let ssh = ssh_words(config)?;
        let via = match &config.rdzv {
            Some(front) if config.is_led() => {
                let (host, port) = (front.host.clone(), front.port.to_string());
                vec![own_program(), "reach".to_string(), host, port]
            }
            _ => ssh,
        };
        let other = shares.iter().find(|share| !share.is_here);
        let mpi = through_mpi.then(|| {
            Ok::<_, Error>(Mpi {
                words: mpi::words(config, &shares, &via)?,
                via: via.join(" "),
                other_host: other.map(|share| share.name.clone()),
            })
        });
        let mpi = mpi.transpose()?;
        let grace_ms =
            |default| milliseconds("--grace-secs", config.grace_secs.unwrap_or(default), 0.0);
        let grace_ms_after_failure = grace_ms(GRACE_AFTER_FAILURE_SECS)?;
        let grace_ms_after_signal = grace_ms(GRACE_AFTER_SIGNAL_SECS)?;
        let silence_secs = config.silence_secs.unwrap_or(SILENCE_SECS);
        let silence_ms = milliseconds("--silence-secs", silence_secs, MIN_SILENCE_SECS)?;
        let hosts = shares.into_iter().map(|share| Host {
            via: (!share.is_here).then(|| via.clone()),
            plan: HostPlan {
                program: program.clone(),
                args: args.to_vec(),
                folder: folder.clone(),
                env: variables.of_host(
                    &share.name,
                    share.is_here,
                    share.node_rank,
                    share.num_ranks,
                ),
                first_rank: share.first_rank,
                num_ranks: share.num_ranks,
                first_local_rank: 0,
                through_mpi,
                grace_ms: grace_ms_after_failure,
                silence_ms: (!share.is_here).then_some(silence_ms),
            },
            name: share.name,
        });
        let hosts = hosts.flat_map(|host| {
            if through_mpi {
                host.by_rank()
            } else {
                vec![host]
            }
        });
        Ok(Self {
            hosts: hosts.collect(),
            world_size,
            meeting,
            mpi,
            random_port,
            may_lose: config.may_lose,
            grace_after_failure: Duration::from_millis(grace_ms_after_failure),
            grace_after_signal: Duration::from_millis(grace_ms_after_signal),
        })
    }
}

impl Host {
    /// A host for each rank.
    fn by_rank(self) -> Vec<Self> {
        let of_rank = |local_rank| Self {
            name: self.name.clone(),
            via: None,
            plan: HostPlan {
                first_rank: self.plan.first_rank + local_rank,
                first_local_rank: local_rank,
                num_ranks: 1,
                ..self.plan.clone()
            },
        };
        (0..self.plan.num_ranks).map(of_rank).collect()
    }
}

/// A time given in seconds.
fn milliseconds(option: &str, secs: f64, least: f64) -> Result<u64> {
    if (least..=1e6).contains(&secs) {
        return Ok((secs * 1000.0) as u64);
    }
    Err(Error::Launch(format!(
        "{option}: expected a time from {least} to 1000000 seconds, got {secs}"
    )))
}

/// The command that runs commands on other hosts, if it is wanted for any.
fn ssh_words(config: &LaunchConfig) -> Result<Vec<String>> {
    let given = [
        ("--ssh", config.ssh.is_some()),
        (
            "--silence-secs",
            config.silence_secs.is_some() && !config.is_led(),
        ),
    ];
    if let Some((option, _)) = given
        .iter()
        .find(|(_, given)| *given && config.hostfile.is_none())
    {
        return Err(Error::Launch(format!(
            "{option} is for the hosts of a --hostfile, which is not given"
        )));
    }
    let command = config.ssh.as_deref().unwrap_or(SSH);
    let words: Vec<String> = command.split_whitespace().map(String::from).collect();
    if words.is_empty() {
        return Err(Error::Launch(
            "--ssh: expected a command, got nothing".to_string(),
        ));
    }
    Ok(words)
}

/// Where the ranks meet, and whether the port is a random one.
fn meeting(config: &LaunchConfig, shares: &[Share]) -> Result<(RendezvousAddress, bool)> {
    let first = &shares[0];
    if let Some(meeting) = &config.rdzv {
        if config.is_led() {
            // There the launchers meet.
            let (host, port) = (meeting.host.clone(), random_port()?);
            return Ok((RendezvousAddress { host, port }, true));
        }
        if first.is_here {
            check_meeting(meeting)?;
        }
        return Ok((meeting.clone(), false));
    }
    if shares.len() == 1 && first.is_here {
        let port = free_port()?;
        let host = "127.0.0.1".to_string();
        return Ok((RendezvousAddress { host, port }, true));
    }
    if is_loopback(&first.name) && shares.len() > 1 {
        return Err(Error::Launch(format!(
            "the ranks would meet on the first host, but its name {:?} means another machine on every host\n\
             hint: write the name under which the others reach it in the host file, or give --rdzv HOST:PORT",
            first.name
        )));
    }
    let (host, port) = (first.name.clone(), random_port()?);
    Ok((RendezvousAddress { host, port }, true))
}

/// Below the ports that systems hand out by themselves, so probably free on another host.
fn random_port() -> Result<u16> {
    let random =
        random_bytes().map_err(|error| Error::Launch(format!("no random port: {error}")))?;
    Ok(20000 + u16::from_le_bytes(random) % 12000)
}

/// An error if the address is not known here, on the host of rank 0, or if somebody listens there already.
fn check_meeting(meeting: &RendezvousAddress) -> Result<()> {
    let Ok(addresses) = (meeting.host.as_str(), meeting.port).to_socket_addrs() else {
        return Err(Error::Launch(format!(
            "--rdzv: the host name {:?} is not known here",
            meeting.host
        )));
    };
    for address in addresses {
        let bound = TcpListener::bind(address);
        // Other errors may be due to an address that is this host's only seen from outside.
        if bound.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrInUse) {
            return Err(Error::Launch(format!(
                "--rdzv: port {} of {} is taken\nhint: choose another one, or end the run that uses it",
                meeting.port, meeting.host
            )));
        }
    }
    Ok(())
}

fn free_port() -> Result<u16> {
    let bound = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    match bound {
        Ok(address) => Ok(address.port()),
        Err(error) => Err(Error::Launch(format!("no free port on 127.0.0.1: {error}"))),
    }
}

fn current_folder() -> Result<String> {
    let folder = std::env::current_dir()
        .map_err(|error| Error::Launch(format!("cannot tell the current folder: {error}")))?;
    folder.into_os_string().into_string().map_err(|folder| {
        Error::Launch(format!("the current folder's name {folder:?} is not UTF-8"))
    })
}
