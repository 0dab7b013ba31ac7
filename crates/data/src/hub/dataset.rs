//! From the name of a data set on a hub to its files.

use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};

use super::data_use::DataUse;
use super::fetch::{Cached, Fetch};
use super::repo_spec::{RepoKind, is_inside};
use super::snapshot::Snapshots;
use super::{HubConfig, RepoSpec};
use crate::file_format::{ENDINGS, FileFormat};
use crate::words::counted;
use crate::words::few;

/// What was chosen of a data set on a hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetFiles {
    /// The files, in the cache, by name.
    pub files: Vec<PathBuf>,
    /// Their names in the data set.
    pub taken: Vec<String>,
    /// Names of files with data that are of another split.
    pub left: Vec<String>,
}

/// [`resolve_dataset_with`] the settings of the process environment.
///
/// # Errors
/// See [`resolve_dataset_with`] and [`HubConfig::from_env`].
pub fn resolve_dataset(name: &str, usage: DataUse) -> Result<DatasetFiles> {
    resolve_dataset_with(name, usage, &HubConfig::from_env()?)
}

/// Files with data, by their endings, of the data set `datasets/org/name[@revision][/path]`, fetched into the cache unless they are
/// there already. `path` is a file or a glob, which gives the files that it names, or a folder, of which, as of the whole data set, come the files
/// for this [`DataUse`]. A revision has no `/`.
///
/// # Errors
/// Another name; the hub does not have it, refuses access or cannot be reached, and the cache has no complete copy; there are no such files.
pub fn resolve_dataset_with(
    name: &str,
    usage: DataUse,
    config: &HubConfig,
) -> Result<DatasetFiles> {
    let Some((spec, path)) = parse(name) else {
        bail!(
            "data hub://{name} is not the name of a data set on a hub\nhint: it is hub://datasets/org/name, perhaps with @revision and then with /path"
        );
    };
    let snapshots = Snapshots::new(&config.cache_dir, &spec);
    let wanted = Wanted { path: &path, usage };
    let cached = cached(&snapshots, &spec, &wanted).ok_or_else(|| {
        Error::msg(format!(
            "dataset {spec} is not complete in the cache {:?}, and HF_HUB_OFFLINE forbids to fetch it\nhint: unset HF_HUB_OFFLINE for one run",
            config.cache_dir
        ))
    });
    let get = |fetch: &Fetch<'_>| fetch_files(fetch, &spec, &wanted);
    let found = Fetch::unless_cached(config, &spec, &snapshots, cached, get)?;
    if !found.is_whole {
        tracing::warn!(
            "the cache has {} of dataset {spec}, which another program has fetched; whether the hub has more is not known",
            counted(found.files.len(), "file")
        );
    }
    let dir = snapshots.dir(&found.commit);
    let (taken, left) = wanted.of(&found.files)?;
    Ok(DatasetFiles {
        files: taken.iter().map(|name| dir.join(name)).collect(),
        taken,
        left,
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
    (path.is_empty() || is_inside(path)).then(|| (spec, path.to_string()))
}

/// What the cache has, if that is all that is wanted. Without the hub's list of files, what another program has fetched of them is
/// all that is known.
fn cached(snapshots: &Snapshots, spec: &RepoSpec, wanted: &Wanted<'_>) -> Option<Cached> {
    let commit = snapshots.commit(spec)?;
    let listed = snapshots.listed(&commit);
    let is_whole = listed.is_some();
    let files = listed.or_else(|| snapshots.there(&commit))?;
    let dir = snapshots.dir(&commit);
    let (taken, _) = wanted.of(&files).ok()?;
    let is_there = !taken.is_empty() && taken.iter().all(|file| dir.join(file).exists());
    is_there.then_some(Cached {
        commit,
        files,
        is_whole,
    })
}

fn fetch_files(fetch: &Fetch<'_>, spec: &RepoSpec, wanted: &Wanted<'_>) -> Result<()> {
    let (taken, left) = wanted.of(&fetch.files)?;
    for file in &taken {
        fetch.file(file)?;
    }
    if !taken.is_empty() {
        return Ok(());
    }
    let Wanted { path, usage } = wanted;
    let hint = format!(
        "hint: name the files you want: hub://datasets/{}/data/part-*.parquet",
        spec.repo_id
    );
    match (left.is_empty(), usage) {
        (true, _) => bail!(
            "dataset {spec} has no file that ends in {ENDINGS} at {path:?}; its files are {}",
            few(&fetch.files)
        ),
        (false, DataUse::Training) => bail!(
            "dataset {spec} has files for validation or test only at {path:?}: {}\n{hint}",
            few(&left)
        ),
        (false, DataUse::Evaluation) => bail!(
            "dataset {spec} has files for training only at {path:?}: {}\n{hint}, or hold out a part of --data with --eval-fraction",
            few(&left)
        ),
    }
}

/// What is wanted of a data set.
struct Wanted<'a> {
    path: &'a str,
    usage: DataUse,
}

impl Wanted<'_> {
    /// Those of `files` that are wanted, and those with data that a folder has for another use, by name.
    fn of(&self, files: &[String]) -> Result<(Vec<String>, Vec<String>)> {
        let mut files: Vec<&String> = files
            .iter()
            .filter(|file| FileFormat::of(Path::new(file)).is_some())
            .collect();
        files.sort();
        let named = files.iter().filter(|file| **file == self.path);
        let named: Vec<String> = named.map(ToString::to_string).collect();
        if !named.is_empty() {
            return Ok((named, Vec::new()));
        }
        if self.path.contains(['*', '?', '[']) {
            let pattern = match glob::Pattern::new(self.path) {
                Ok(pattern) => pattern,
                Err(err) => bail!("{:?} in a data set on a hub is no glob: {err}", self.path),
            };
            let matching = files
                .into_iter()
                .filter(|file| pattern.matches_with(file, GLOB));
            return Ok((matching.cloned().collect(), Vec::new()));
        }
        let below = files.into_iter().filter_map(|file| {
            let inner = match self.path {
                "" => file.as_str(),
                folder => file.strip_prefix(folder)?.strip_prefix('/')?,
            };
            Some((file, inner))
        });
        let (taken, left) = self.usage.choose(below.collect(), |(_, inner)| inner);
        let names = |files: Vec<(&String, &str)>| {
            let files = files.into_iter().map(|(file, _)| file.clone());
            files.collect()
        };
        Ok((names(taken), names(left)))
    }
}

/// As in globs of files: a `*` stays within a folder.
const GLOB: glob::MatchOptions = glob::MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: false,
};
