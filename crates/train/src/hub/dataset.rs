//! From the name of a data set on a hub to a folder or file with data.

use std::path::{Component, Path, PathBuf};

use candle_core::{Error, Result, bail};

use super::fetch::Fetch;
use super::fetch_lock::FetchLock;
use super::repo_spec::RepoKind;
use super::snapshot::Snapshots;
use super::{HubConfig, RepoSpec};

/// Endings of files with data.
const ENDINGS: [&str; 5] = ["txt", "jsonl", "ndjson", "json", "parquet"];

/// [`resolve_dataset_with`] the settings of the process environment.
///
/// # Errors
/// See [`resolve_dataset_with`] and [`HubConfig::from_env`].
pub fn resolve_dataset(name: &str) -> Result<PathBuf> {
    resolve_dataset_with(name, &HubConfig::from_env()?)
}

/// The folder, or file, of the data set `datasets/org/name[@revision][/path]`, all of whose files with data (.txt, .jsonl, .json, .parquet)
/// below `path` are fetched into the cache, unless they are there already. A revision has no `/`.
///
/// # Errors
/// Another name; the hub does not have it, refuses access or cannot be reached, and the cache has no complete copy.
pub fn resolve_dataset_with(name: &str, config: &HubConfig) -> Result<PathBuf> {
    let Some((spec, path)) = parse(name) else {
        bail!(
            "data hub://{name} is not the name of a data set on a hub\nhint: it is hub://datasets/org/name, perhaps with @revision and then with /path"
        );
    };
    let snapshots = Snapshots::new(&config.cache_dir, &spec);
    let commit = fetch_dataset(&spec, &path, &snapshots, config)?;
    Ok(match path.as_str() {
        "" => snapshots.dir(&commit),
        path => snapshots.dir(&commit).join(path),
    })
}

fn parse(name: &str) -> Option<(RepoSpec, String)> {
    let mut parts = name.strip_prefix("datasets/")?.splitn(3, '/');
    let (org, repo) = (parts.next()?, parts.next()?);
    let path = parts.next().unwrap_or_default().trim_end_matches('/');
    let spec = RepoSpec {
        kind: RepoKind::Dataset,
        ..RepoSpec::parse(&format!("{org}/{repo}"))?
    };
    let is_inside = Path::new(path)
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    is_inside.then(|| (spec, path.to_string()))
}

/// Fetches what is missing; the commit.
fn fetch_dataset(
    spec: &RepoSpec,
    path: &str,
    snapshots: &Snapshots,
    config: &HubConfig,
) -> Result<String> {
    let cached = || {
        let commit = snapshots.commit(spec)?;
        let files = snapshots.listed(&commit)?;
        let dir = snapshots.dir(&commit);
        let is_there = wanted(&files, path).all(|file| dir.join(file).exists());
        is_there.then_some(commit)
    };
    if config.offline {
        return match cached() {
            Some(commit) => Ok(commit),
            None => bail!(
                "dataset {spec} is not complete in the cache {:?}, and HF_HUB_OFFLINE forbids to fetch it\nhint: unset HF_HUB_OFFLINE for one run",
                config.cache_dir
            ),
        };
    }
    if let (true, Some(commit)) = (spec.is_commit(), cached()) {
        return Ok(commit);
    }
    let _lock = FetchLock::wait(&config.cache_dir, spec);
    let fetch = Fetch::new(config, spec, snapshots)?;
    let (commit, files) = match (fetch.list(), cached()) {
        (Ok(listed), _) => listed,
        (Err(failure), Some(commit)) if failure.is_transient() => {
            tracing::warn!(
                "cannot reach {}; using {spec} as it is in the cache",
                config.endpoint
            );
            return Ok(commit);
        }
        (Err(failure), _) => return Err(fetch.error("the list of files", failure)),
    };
    let is_plain = |path: &str| {
        Path::new(path)
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
    };
    if !is_plain(&commit) || !files.iter().all(|file| is_plain(file)) {
        return Err(Error::msg(format!(
            "{} lists names for {spec} that lead out of its folder",
            config.endpoint
        )));
    }
    if wanted(&files, path).next().is_none() {
        bail!(
            "dataset {spec} has no file that ends in .txt, .jsonl, .json or .parquet at {path:?}; its files are {}",
            files.join(", ")
        );
    }
    for file in wanted(&files, path) {
        if fetch.file(&commit, file)?.is_none() {
            bail!("dataset {spec} has no {file}, which is in its list of files");
        }
    }
    snapshots.set_listed(&commit, &files);
    if snapshots.commit(spec).as_ref() != Some(&commit) {
        fetch.set_commit(&commit)?;
    }
    Ok(commit)
}

/// The files with data at or below `path`.
fn wanted<'a>(files: &'a [String], path: &'a str) -> impl Iterator<Item = &'a String> {
    files.iter().filter(move |file| {
        let file = Path::new(file);
        let ending = file
            .extension()
            .and_then(|ending| ending.to_str())
            .unwrap_or_default();
        file.starts_with(path) && ENDINGS.contains(&ending.to_lowercase().as_str())
    })
}
