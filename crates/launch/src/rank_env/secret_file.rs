//! The run's secret from a file that nobody else can read.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::variables::Variables;
use crate::{Error, Result, Secret};

/// The secret itself.
const SECRET: &str = "CANDLE_TRAIN_RUN_TOKEN";

/// The file that has it.
const FILE: &str = "CANDLE_TRAIN_RUN_TOKEN_FILE";

/// The secret that the user or the launcher has given, if one is.
///
/// # Errors
/// It is empty; its file cannot be read, or others can read it too.
pub(super) fn given(vars: &Variables) -> Result<Option<Secret>> {
    let (variable, secret) = match (vars.get(SECRET), vars.get(FILE)) {
        (Some(secret), _) => (SECRET.to_string(), secret),
        (None, Some(path)) => (format!("{FILE}={path}"), read(Path::new(&path))?),
        (None, None) => return Ok(None),
    };
    match secret.trim() {
        "" => Err(Error::Environment(format!(
            "{variable}: expected a secret, got nothing"
        ))),
        secret => Ok(Some(secret.into())),
    }
}

fn read(path: &Path) -> Result<String> {
    let problem = |what: String| Error::Environment(format!("{FILE}: {what}: {}", path.display()));
    let data = std::fs::metadata(path)
        .map_err(|error| problem(format!("cannot read the run's secret ({error})")))?;
    let mode = data.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(problem(format!(
            "others than its owner may use the file with the run's secret (mode {mode:o}); chmod 600 it and take another secret"
        )));
    }
    std::fs::read_to_string(path)
        .map_err(|error| problem(format!("cannot read the run's secret ({error})")))
}
