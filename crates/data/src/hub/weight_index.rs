//! `model.safetensors.index.json`: the files of sharded weights.

use std::collections::BTreeSet;
use std::path::Path;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::read_file;
use serde_json::Value;

use super::repo_spec::is_name;

/// Names of the shards that the index at `path` lists, sorted.
///
/// # Errors
/// The file cannot be read, has no `weight_map`, or names something that is not a plain `.safetensors` file name: the
/// index comes from the network and must not lead out of its folder.
pub(super) fn read_shard_names(path: &Path) -> Result<BTreeSet<String>> {
    let bytes = match read_file(path) {
        Ok(bytes) => bytes,
        Err(e) => bail!("cannot read the index of the weights {path:?}: {e}"),
    };
    let index: Value = match serde_json::from_slice(&bytes) {
        Ok(index) => index,
        Err(e) => bail!("the index of the weights {path:?} is not valid JSON: {e}"),
    };
    let Some(map) = index["weight_map"]
        .as_object()
        .filter(|map| !map.is_empty())
    else {
        bail!("the index of the weights {path:?} has no `weight_map`, or an empty one");
    };
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        match file
            .as_str()
            .filter(|name| is_name(name) && name.ends_with(".safetensors"))
        {
            Some(name) => names.insert(name.to_string()),
            None => bail!(
                "the index of the weights {path:?} puts tensor {tensor:?} into {file}, expected the name of a .safetensors file beside it"
            ),
        };
    }
    Ok(names)
}
