//! A JSON file of a checkpoint that may be missing.

use std::path::Path;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::read_file;
use serde_json::Value;

/// `None` when there is no such file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>> {
    let bytes = match read_file(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => bail!("cannot read {path:?}: {e}"),
    };
    match serde_json::from_slice(&bytes) {
        Ok(value) => Ok(Some(value)),
        Err(e) => bail!("{path:?} is not valid JSON: {e}"),
    }
}
