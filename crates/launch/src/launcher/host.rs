//! The hosts of a run: this one, those of a host file, and those whose launchers have called.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::config::LaunchConfig;
use crate::{Error, Result};

/// A host, and how many ranks it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host {
    pub(super) name: String,
    /// Of the launcher there, at random, if that calls: one that was started again is another one. Otherwise 0.
    pub(super) id: u64,
    pub(super) num_ranks: usize,
    #[serde(skip)]
    pub(super) is_here: bool,
}

impl Host {
    /// Those that this launcher starts ranks on by itself; at least one.
    pub(super) fn known(config: &LaunchConfig) -> Result<Vec<Self>> {
        match &config.hostfile {
            Some(path) => read(path),
            None => Ok(vec![Self::own(config)?]),
        }
    }

    /// This one.
    pub(super) fn own(config: &LaunchConfig) -> Result<Self> {
        match config.nproc_per_node.unwrap_or(1) {
            0 => Err(Error::Launch(
                "--nproc-per-node: expected at least 1, got 0".to_string(),
            )),
            num_ranks => Ok(Self {
                name: own_name(),
                id: 0,
                num_ranks,
                is_here: true,
            }),
        }
    }
}

/// The name of this host: CANDLE_TRAIN_HOST, or else the system's.
fn own_name() -> String {
    let given = std::env::var("CANDLE_TRAIN_HOST").ok();
    let given = given.filter(|name| !name.trim().is_empty());
    let name = given.or_else(|| nix::unistd::gethostname().ok()?.into_string().ok());
    name.unwrap_or_else(|| "localhost".to_string())
}

pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host == "::1" || host.starts_with("127.")
}

/// The hosts of a file in DeepSpeed's format: one per line with its number of ranks, `#` before comments.
///
/// ```text
/// # the two machines under the desk
/// node1 slots=4
/// node2 slots=2
/// ```
fn read(path: &Path) -> Result<Vec<Host>> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Error::Launch(format!("cannot read host file {}: {error}", path.display()))
    })?;
    let own_name = own_name();
    let (mut hosts, mut line_of) = (Vec::<Host>::new(), Vec::new());
    for (line, text) in (1..).zip(text.lines()) {
        let problem = |what: String| {
            Error::Launch(format!("host file {}, line {line}: {what}", path.display()))
        };
        let text = text.split('#').next().unwrap_or("").trim();
        if text.is_empty() {
            continue;
        }
        let (name, num_ranks) = parse_line(text).map_err(problem)?;
        if let Some(earlier) = hosts.iter().position(|earlier| earlier.name == name) {
            return Err(problem(format!(
                "host {name:?} stands in line {} already",
                line_of[earlier]
            )));
        }
        line_of.push(line);
        hosts.push(Host {
            is_here: is_loopback(name) || name == own_name,
            name: name.to_string(),
            id: 0,
            num_ranks,
        });
    }
    if hosts.is_empty() {
        let path = path.display();
        return Err(Error::Launch(format!(
            "host file {path} names no host\nhint: each line is `host slots=NUMBER_OF_RANKS`"
        )));
    }
    Ok(hosts)
}

fn parse_line(text: &str) -> std::result::Result<(&str, usize), String> {
    let words = text.split_once(char::is_whitespace);
    let parts = words.and_then(|(name, slots)| Some((name, slots.trim().strip_prefix("slots=")?)));
    let Some((name, slots)) = parts.filter(|(_, slots)| !slots.contains(char::is_whitespace))
    else {
        return Err(format!("expected `host slots=4`, got {text:?}"));
    };
    // To ssh it would be an option.
    if name.starts_with('-') {
        return Err(format!("expected a host name, got {name:?}"));
    }
    match slots.parse() {
        Ok(number @ 1..) => Ok((name, number)),
        _ => Err(format!(
            "expected slots=NUMBER, at least 1, got slots={slots}"
        )),
    }
}
