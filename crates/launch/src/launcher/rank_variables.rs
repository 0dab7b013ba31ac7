//! The environment that ranks are given, with torchrun's names.

use crate::{Error, Result};

/// Variables with these beginnings steer a run, so ranks on other hosts get this host's.
const PASSED_ON: [&str; 5] = ["CANDLE_", "NCCL_", "OMP_", "RAYON_", "RUST_"];
/// The variables that the launcher itself decides.
const OWN: [&str; 13] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "CANDLE_TRAIN_HOST",
    "CANDLE_TRAIN_RUN_TOKEN",
    "CANDLE_TRAIN_RUN_TOKEN_FILE",
    "CANDLE_TRAIN_RESTART_COUNT",
];

/// What other launchers say, in which this one was started, does not hold for ranks of ours.
pub(super) const FOREIGN: [&str; 8] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
];

/// The variables of all ranks of a host, on top of each other: what other hosts are passed, what the user gave, and the launcher's `own`.
pub(super) fn of_host(
    is_here: bool,
    given: &[(String, String)],
    own: impl IntoIterator<Item = (&'static str, String)>,
) -> Vec<(String, String)> {
    let passed_on = if is_here { Vec::new() } else { passed_on() };
    let own = own.into_iter();
    let own = own.map(|(name, value)| (name.to_string(), value));
    [passed_on, given.to_vec(), own.collect()].concat()
}

/// The variables of `--env NAME=VALUE` and `--env NAME`.
pub(super) fn given(options: &[String]) -> Result<Vec<(String, String)>> {
    let mut given = Vec::new();
    for option in options {
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, value.to_string()),
            None => match std::env::var(option) {
                Ok(value) => (option.as_str(), value),
                Err(error) => return Err(Error::Launch(format!("--env {option}: {error}"))),
            },
        };
        if name.is_empty() {
            return Err(Error::Launch(format!(
                "--env: expected NAME or NAME=VALUE, got {option:?}"
            )));
        }
        if OWN.contains(&name) {
            return Err(Error::Launch(format!(
                "--env {name}: the launcher sets this variable itself"
            )));
        }
        given.push((name.to_string(), value));
    }
    Ok(given)
}

fn passed_on() -> Vec<(String, String)> {
    let all = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    all.filter(|(name, _)| !OWN.contains(&name.as_str()))
        .filter(|(name, _)| PASSED_ON.iter().any(|prefix| name.starts_with(prefix)))
        .collect()
}
