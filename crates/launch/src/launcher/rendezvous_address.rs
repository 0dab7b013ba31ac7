//! A host and a port, as in `--rdzv`.

use std::fmt;
use std::str::FromStr;

/// Where the ranks of a run meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RendezvousAddress {
    /// The name or address; IPv6 without brackets.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
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
        let host = bracketed.unwrap_or(host);
        let port = port.parse().ok().filter(|port| *port > 0);
        match port {
            Some(port) if !host.is_empty() && (bracketed.is_some() || !host.contains(':')) => {
                Ok(Self {
                    host: host.to_string(),
                    port,
                })
            }
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
