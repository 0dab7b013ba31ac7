//! Which of several launchers leads: the one at the address that all of them were told.

use std::io::ErrorKind;
use std::net::TcpListener;

use crate::control::listening::listen;
use crate::launcher::call;
use crate::launcher::config::LaunchConfig;
use crate::rank_env::given_secret;
use crate::{Error, Result, Secret};

/// Where the launchers of a run meet.
pub(super) struct LeaderAddress {
    /// HOST:PORT.
    pub(super) front: String,
    /// What all of them know.
    pub(super) secret: Secret,
    /// If this one leads.
    pub(super) listener: Option<TcpListener>,
}

/// Where the launchers meet, if there are several.
///
/// # Errors
/// There is no secret, or the address means nothing here.
pub(super) fn place_of(config: &LaunchConfig) -> Result<Option<LeaderAddress>> {
    let problem = |what: String| Err(Error::Launch(what));
    if !config.is_led() {
        return Ok(None);
    }
    let Some(meeting) = &config.rdzv else {
        return problem(
            "--nnodes needs --rdzv HOST:PORT, the same on all hosts: a name of the host whose launcher leads, and a port free there"
                .to_string(),
        );
    };
    let Some(secret) = given_secret(config.short_secret)? else {
        return problem(
            "--nnodes: the launchers need a secret, since who leads runs programs on the other hosts\n\
             hint: name a file with a random secret that only you can read in CANDLE_TRAIN_RUN_TOKEN_FILE, the same on all hosts: \
             (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
                .to_string(),
        );
    };
    let (front, addresses) = (meeting.to_string(), meeting.resolve()?);
    // A name of this host may mean a loopback address here, where others cannot call.
    let is_here = addresses.iter().any(|address| {
        let bound = TcpListener::bind((address.ip(), 0));
        !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
    });
    let is_one_host = meeting.host == "localhost";
    let listening = is_here.then(|| listen(&meeting.host, &addresses, is_one_host));
    let listener = match listening.transpose() {
        Ok(listener) => listener,
        // By a launcher that leads, if two of them are on this host.
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            if let Err(error) = call::meet(&front, &secret) {
                return problem(format!(
                    "--rdzv: port {} of {} is taken, and not by a launcher of this run: {error}\n\
                     hint: choose another one, or end the run that uses it",
                    meeting.port, meeting.host
                ));
            }
            None
        }
        Err(error) => return problem(format!("--rdzv: cannot listen at {front}: {error}")),
    };
    Ok(Some(LeaderAddress {
        front,
        secret,
        listener,
    }))
}
