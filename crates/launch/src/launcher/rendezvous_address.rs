//! A host and a port, as in `--rdzv`.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use crate::Error;

/// Where the ranks of a run meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousAddress {
    /// The name or address; IPv6 without brackets.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
}

impl RendezvousAddress {
    /// What the name means on this host.
    ///
    /// # Errors
    /// It is not known here.
    pub(super) fn resolve(&self) -> crate::Result<Vec<SocketAddr>> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        found.map(Iterator::collect).map_err(|_| {
            let host = &self.host;
            Error::Launch(format!("--rdzv: the host name {host:?} is not known here"))
        })
    }
}

impl FromStr for RendezvousAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected HOST:PORT with a port from 1 to 65535, got {text:?}");
        let (host, port) = text.rsplit_once(':').ok_or_else(expected)?;
        // An IPv6 address has colons itself, so it stands in brackets.
        let bracketed = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let is_host = bracketed.is_some() || !host.contains(':');
        let host = bracketed.unwrap_or(host).to_string();
        match port.parse() {
            Ok(port @ 1..) if !host.is_empty() && is_host => Ok(Self { host, port }),
            _ => Err(expected()),
        }
    }
}

impl fmt::Display for RendezvousAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}
