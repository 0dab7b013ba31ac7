//! From what the user typed to a folder with a checkpoint.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};

use super::fetch::{Cached, Fetch};
use super::repo_spec::is_name;
use super::snapshot::{
    CHAT_TEMPLATE, MORE_CHAT_TEMPLATES, Needs, OPTIONAL_FILES, REQUIRED_FILES, Snapshots,
    WEIGHT_INDEX, WEIGHTS,
};
use super::weight_index::read_shard_names;
use super::{HubConfig, RepoSpec};

/// As [`resolve_model`], of which only configuration, tokenizer and chat template are needed: no weights are fetched.
///
/// # Errors
/// As [`resolve_model`].
pub fn resolve_tokenizer(spec: &str) -> Result<PathBuf> {
    match local_dir(spec)? {
        Some(dir) => Ok(dir),
        None => fetch_model(&parse(spec)?, &HubConfig::from_env()?, Needs::Tokenizer),
    }
}

/// [`resolve_model_with`] the settings of the process environment, which are read only when the hub is needed.
///
/// # Errors
/// See [`resolve_model_with`] and [`HubConfig::from_env`].
pub fn resolve_model(spec: &str) -> Result<PathBuf> {
    match local_dir(spec)? {
        Some(dir) => Ok(dir),
        None => fetch_model(&parse(spec)?, &HubConfig::from_env()?, Needs::Weights),
    }
}

/// The folder of the model `spec`: an existing folder is returned as it is, `org/name[@revision]` is fetched into the
/// cache, unless it is there already.
///
/// Fetched are `config.json`, `tokenizer.json`, the weights (`model.safetensors`, or `model.safetensors.index.json` and
/// the files it names) and, where the model has them, `tokenizer_config.json`, `generation_config.json`,
/// `special_tokens_map.json` and `chat_template.jinja` with the templates in `additional_chat_templates`. Blocks until everything is there. Of
/// several processes one fetches and the others wait for it.
///
/// # Errors
/// `spec` is neither form or a file; the hub does not have the model or a file, refuses access, or cannot be reached (and
/// the cache has no complete copy); the connection breaks three times in a row: what has arrived is continued next time.
pub fn resolve_model_with(spec: &str, config: &HubConfig) -> Result<PathBuf> {
    match local_dir(spec)? {
        Some(dir) => Ok(dir),
        None => fetch_model(&parse(spec)?, config, Needs::Weights),
    }
}

/// The folder of the model `spec` if that is here already: an existing folder, or what the cache has of `org/name[@revision]`, of which there
/// is at least `config.json`. Nothing is fetched.
pub fn find_model(spec: &str) -> Option<PathBuf> {
    let dir = match local_dir(spec).ok()? {
        Some(dir) => dir,
        None => {
            let spec = RepoSpec::parse(spec)?;
            let snapshots = Snapshots::new(&HubConfig::from_env().ok()?.cache_dir, &spec);
            snapshots.dir(&snapshots.commit(&spec)?)
        }
    };
    dir.join(REQUIRED_FILES[0]).is_file().then_some(dir)
}

/// Whether weights are in `dir`, which is that of the model `spec`: in a folder of one's own they are, or what is there is damaged, if one file
/// tells so; in the cache a part of them may have been fetched.
pub fn has_weights(spec: &str, dir: &Path) -> bool {
    let index = dir.join(WEIGHT_INDEX);
    let are_there = |shards: BTreeSet<String>| shards.iter().all(|shard| dir.join(shard).exists());
    let has_all = || Path::new(spec).is_dir() || read_shard_names(&index).is_ok_and(are_there);
    dir.join(WEIGHTS).exists() || index.exists() && has_all()
}

/// Whether a file is a GGUF file by its name.
pub fn is_gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|it| it.eq_ignore_ascii_case("gguf"))
}

fn local_dir(spec: &str) -> Result<Option<PathBuf>> {
    let path = Path::new(spec);
    if path.is_file() && is_gguf(path) {
        bail!(
            "model {spec:?} is a GGUF file, which llama.cpp runs: llama-cli -m {spec}\nhint: give the folder that it was made from, which holds config.json, or \
             org/name of the model on the hub; inspect tells what is in a GGUF file"
        );
    }
    if path.is_file() {
        bail!(
            "model {spec:?} is a file, expected the folder of a checkpoint\nhint: give the folder that holds config.json"
        );
    }
    if path.join("manifest.json").is_file() && !path.join(REQUIRED_FILES[0]).is_file() {
        bail!(
            "model {spec:?} is a checkpoint of a run, and no model\nhint: candle-train export {spec} DIR writes the model that it has"
        );
    }
    Ok(path.is_dir().then(|| path.to_path_buf()))
}

fn parse(spec: &str) -> Result<RepoSpec> {
    match RepoSpec::parse(spec) {
        Some(spec) => Ok(spec),
        None => bail!(
            "model {spec:?} is neither an existing folder nor the name of a model on a hub\nhint: give a folder with config.json, or org/name or org/name@revision"
        ),
    }
}

fn fetch_model(spec: &RepoSpec, config: &HubConfig, needs: Needs) -> Result<PathBuf> {
    let snapshots = Snapshots::new(&config.cache_dir, spec);
    let cached = match snapshots.complete(spec, needs) {
        Ok(commit) => Ok(Cached {
            commit,
            files: Vec::new(),
            is_whole: true,
        }),
        Err(missing) => Err(Error::msg(format!(
            "model {spec} is not complete in the cache {:?}: it lacks {missing}, there is no folder {:?} here, and HF_HUB_OFFLINE forbids to fetch it\nhint: unset HF_HUB_OFFLINE for one run, or give the folder of a checkpoint",
            config.cache_dir, spec.repo_id
        ))),
    };
    let get = |fetch: &Fetch<'_>| fetch_files(fetch, spec, needs);
    let found = Fetch::unless_cached(config, spec, &snapshots, cached, get)?;
    Ok(snapshots.dir(&found.commit))
}

/// Fetches what the snapshot lacks, small files first: a model that cannot be used is found out before gigabytes have been
/// moved.
fn fetch_files(fetch: &Fetch<'_>, spec: &RepoSpec, needs: Needs) -> Result<()> {
    for file in REQUIRED_FILES {
        if !fetch.has(file) {
            bail!(
                "model {spec} has no {file}\nhint: only models with config.json, tokenizer.json and safetensors weights are supported; transformers' save_pretrained writes them"
            );
        }
        fetch.file(file)?;
    }
    let is_template = |file: &str| {
        let name = file.strip_prefix(MORE_CHAT_TEMPLATES);
        name.is_some_and(|name| is_name(name) && name.ends_with(".jinja"))
            && fetch.has(CHAT_TEMPLATE)
    };
    for file in &fetch.files {
        if OPTIONAL_FILES.contains(&file.as_str()) || is_template(file) {
            fetch.file(file)?;
        }
    }
    if needs == Needs::Tokenizer {
        return Ok(());
    }
    if fetch.has(WEIGHTS) {
        return fetch.file(WEIGHTS).map(drop);
    }
    if !fetch.has(WEIGHT_INDEX) {
        bail!(
            "model {spec} has neither {WEIGHTS} nor {WEIGHT_INDEX}\nhint: only safetensors weights are supported; transformers' save_pretrained converts others"
        );
    }
    for shard in read_shard_names(&fetch.file(WEIGHT_INDEX)?)? {
        if !fetch.has(&shard) {
            bail!("model {spec} has no {shard}, which its {WEIGHT_INDEX} names");
        }
        fetch.file(&shard)?;
    }
    Ok(())
}
