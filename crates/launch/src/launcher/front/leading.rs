//! Which of several launchers leads: the one at the address that all of them were told.

use std::io::ErrorKind;
use std::net::{TcpListener, ToSocketAddrs};

use crate::control::listening::listen;
use crate::launcher::call;
use crate::launcher::config::LaunchConfig;
use crate::rank_env::given_secret;
use crate::{Error, Result, Secret};

/// The part of this launcher among those of a run.
pub(super) enum Place {
    /// It leads: where the others call, and the secret that they know.
    Leader(TcpListener, String, Secret),
    /// Another one leads.
    Member { front: String, secret: Secret },
}

/// The part of this launcher.
///
/// # Errors
/// There is no secret, or the address means nothing here.
pub(super) fn place_of(config: &LaunchConfig) -> Result<Place> {
    let problem = |what: String| Err(Error::Launch(what));
    let Some(meeting) = &config.rdzv else {
        return problem(
            "--nnodes needs --rdzv HOST:PORT, the same on all hosts: a name of the host whose launcher leads, and a port free there"
                .to_string(),
        );
    };
    let Some(secret) = given_secret()? else {
        return problem(
            "--nnodes: the launchers need a secret, since who leads runs programs on the other hosts\n\
             hint: name a file with a random secret that only you can read in CANDLE_TRAIN_RUN_TOKEN_FILE, the same on all hosts: \
             (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
                .to_string(),
        );
    };
    let front = meeting.to_string();
    let found = (meeting.host.as_str(), meeting.port).to_socket_addrs();
    let Ok(addresses) = found.map(Iterator::collect::<Vec<_>>) else {
        let host = &meeting.host;
        return problem(format!("--rdzv: the host name {host:?} is not known here"));
    };
    // A name of this host may mean a loopback address here, where others cannot call.
    let is_here = addresses.iter().any(|address| {
        let bound = TcpListener::bind((address.ip(), 0));
        !bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
    });
    if !is_here {
        return Ok(Place::Member { front, secret });
    }
    let is_one_host = meeting.host == "localhost";
    match listen(&meeting.host, &addresses, is_one_host) {
        Ok(listener) => Ok(Place::Leader(listener, front, secret)),
        // By a launcher that leads, if two of them are on this host.
        Err(error) if error.kind() == ErrorKind::AddrInUse => match call::meet(&front, &secret) {
            Ok(_) => Ok(Place::Member { front, secret }),
            Err(error) => problem(format!(
                "--rdzv: port {} of {} is taken, and not by a launcher of this run: {error}\n\
                 hint: choose another one, or end the run that uses it",
                meeting.port, meeting.host
            )),
        },
        Err(error) => problem(format!("--rdzv: cannot listen at {front}: {error}")),
    }
}
