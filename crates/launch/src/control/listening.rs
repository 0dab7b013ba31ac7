//! Where rank 0 listens.

use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// A listener at the first of these addresses of `host`, to which the other ranks connect, that is one of this host's; at no other
/// one.
///
/// Many hosts resolve their own name to a loopback address, which the ranks of other hosts cannot reach, and a name may be that of a
/// proxy: then, with a warning, it is all addresses of this host.
pub(crate) fn listen(
    host: &str,
    addresses: &[SocketAddr],
    is_one_host: bool,
) -> Result<TcpListener> {
    let is_number = host.parse::<IpAddr>().is_ok();
    for address in addresses {
        if address.ip().is_loopback() && !is_one_host && !is_number {
            continue;
        }
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            bound => return bound,
        }
    }
    let all: SocketAddr = match addresses.first() {
        Some(SocketAddr::V4(first)) => (Ipv4Addr::UNSPECIFIED, first.port()).into(),
        Some(SocketAddr::V6(first)) => (Ipv6Addr::UNSPECIFIED, first.port()).into(),
        None => return Err(Error::new(ErrorKind::NotFound, "the name has no address")),
    };
    tracing::warn!(
        "rank 0 listens on all addresses of this host, as {host} is none of them that other hosts know\n\
         hint: set MASTER_ADDR, the same on all ranks, to the address of this host on their network"
    );
    TcpListener::bind(all)
}

/// Warns of a secret that others may guess, who can reach the listener.
pub(super) fn warn_of_guesses(listener: &TcpListener) -> Result<()> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        tracing::warn!(
            "who reaches {address} can join this run, or end it: its ranks know each other by a job's number or an address, which \
             others can guess\n\
             hint: name a file with a random secret that only you can read in CANDLE_TRAIN_RUN_TOKEN_FILE, the same on all ranks: \
             (umask 077; head -c 32 /dev/urandom | base64 > FILE)"
        );
    }
    Ok(())
}
