//! Files from the hub into the cache. `hf-hub` moves and resumes them; here one process of a host does it for all, and what
//! arrived is checked and tried again.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{Error, Result, bail};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo, Metadata};
use hf_hub::{Cache, Repo, RepoType};

use crate::activity::Activity;
use crate::own_lock::lock;

use super::repo_spec::{RepoKind, is_inside};
use super::snapshot::Snapshots;
use super::{HubConfig, RepoSpec};

/// Tries per file; a try goes on where the last one was cut off.
const NUM_TRIES: u32 = 3;
/// Pause before the second try; it doubles with each further one.
const RETRY_PAUSE: Duration = Duration::from_millis(300);

/// Why a request failed.
enum Failure {
    /// The hub answered with this HTTP status.
    Status(u16),
    /// Anything else: no connection, a connection that broke, a full disk, a file that is not whole.
    Other(String),
}

impl Failure {
    /// True when the same request may succeed later.
    fn is_transient(&self) -> bool {
        matches!(self, Self::Other(_) | Self::Status(429 | 500..))
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        match &error {
            ApiError::RequestError(e) => match **e {
                ureq::Error::StatusCode(status) => Self::Status(status),
                _ => Self::Other(error.to_string()),
            },
            _ => Self::Other(error.to_string()),
        }
    }
}

/// Files of one commit that are in the cache.
pub(super) struct Cached {
    pub(super) commit: String,
    /// All files of the commit, as far as they are known.
    pub(super) files: Vec<String>,
    /// Whether it is known that nothing is missing.
    pub(super) is_whole: bool,
}

/// Fetches files of the commit that a revision names now.
pub(super) struct Fetch<'a> {
    config: &'a HubConfig,
    spec: &'a RepoSpec,
    snapshots: &'a Snapshots,
    api: Api,
    commit: String,
    /// The files of the commit, as the hub lists them.
    pub(super) files: Vec<String>,
}

impl<'a> Fetch<'a> {
    /// Has `get` fetch what it needs, unless what is `cached` will do: offline, for a commit that is whole, and when the hub
    /// cannot be reached.
    pub(super) fn unless_cached(
        config: &'a HubConfig,
        spec: &'a RepoSpec,
        snapshots: &'a Snapshots,
        cached: Result<Cached>,
        get: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Cached> {
        let is_whole = |cached: &Cached| spec.is_commit() && cached.is_whole;
        if config.offline || cached.as_ref().is_ok_and(is_whole) {
            return cached;
        }
        let _lock = lock_of(&config.cache_dir, spec);
        let mut fetch = Self {
            config,
            spec,
            snapshots,
            api: client(config)?,
            commit: String::new(),
            files: Vec::new(),
        };
        let info = match (fetch.repo().info().map_err(Failure::from), cached) {
            (Ok(info), _) => info,
            (Err(failure), Ok(cached)) if failure.is_transient() => {
                tracing::warn!(
                    "cannot reach {}; using {spec} as it is in the cache",
                    config.endpoint
                );
                return Ok(cached);
            }
            (Err(failure), _) => return Err(fetch.error("the list of files", failure)),
        };
        let files = info.siblings.into_iter().map(|file| file.rfilename);
        (fetch.commit, fetch.files) = (info.sha, files.collect());
        if !is_inside(&fetch.commit) || !fetch.files.iter().all(|file| is_inside(file)) {
            bail!(
                "{} lists names for {spec} that lead out of its folder",
                config.endpoint
            );
        }
        get(&fetch)?;
        let Self { commit, files, .. } = fetch;
        if snapshots.listed(&commit).is_none() {
            snapshots.set_listed(&commit, &files);
        }
        if snapshots.commit(spec).as_ref() != Some(&commit)
            && let Err(e) = snapshots.set_commit(spec, &commit)
        {
            bail!(
                "cannot write to the model cache {:?}: {e}",
                config.cache_dir
            );
        }
        Ok(Cached {
            commit,
            files,
            is_whole: true,
        })
    }

    /// Whether the commit has such a file.
    pub(super) fn has(&self, file: &str) -> bool {
        self.files.iter().any(|there| there == file)
    }

    /// Makes `file` be in the snapshot, and returns where.
    pub(super) fn file(&self, file: &str) -> Result<PathBuf> {
        let path = self.snapshots.dir(&self.commit).join(file);
        let mut num_tries = 1;
        while !path.exists() {
            match self.try_file(file, &path) {
                Ok(()) => break,
                Err(failure) if failure.is_transient() && num_tries < NUM_TRIES => {
                    std::thread::sleep(RETRY_PAUSE * 2u32.pow(num_tries - 1));
                    num_tries += 1;
                }
                Err(failure) => return Err(self.error(file, failure)),
            }
        }
        Ok(path)
    }

    fn try_file(&self, file: &str, path: &Path) -> std::result::Result<(), Failure> {
        let metadata = self.metadata(file)?;
        let size = metadata.size() as u64;
        let blob = self.snapshots.blob(metadata.etag());
        // A link whose target is gone would be in the way of the new one.
        remove(path)?;
        if blob.exists() {
            // Another commit has the same file: nothing to transfer.
            if file_len(&blob) == size && link(&blob, path, file).is_ok() {
                return Ok(());
            }
            remove(&blob)?;
        }
        let partial = blob.with_extension("part");
        let lock = blob.with_extension("lock");
        // hf-hub writes to them whatever they are: a link would lead to somebody else's file.
        for path in [&partial, &lock, &self.snapshots.reference(self.spec)] {
            if path
                .symlink_metadata()
                .is_ok_and(|there| !there.is_file() || there.nlink() > 1)
            {
                remove(path)?;
            }
        }
        // A partial file that is not shorter than the whole cannot be continued.
        if file_len(&partial) >= size {
            remove(&partial)?;
        }
        let _activity = self.announce(file, size, partial);
        self.repo().download(file)?;
        if let Err(reason) = check(path, size) {
            remove(&blob)?;
            remove(path)?;
            return Err(Failure::Other(reason));
        }
        Ok(())
    }

    fn metadata(&self, file: &str) -> std::result::Result<Metadata, Failure> {
        let metadata = self.api.metadata(&self.repo().url(file))?;
        let (etag, commit) = (metadata.etag(), metadata.commit_hash());
        // It becomes part of a path in the cache.
        if !is_inside(etag) {
            return Err(Failure::Other(format!(
                "the server sent the header ETag: {etag:?}"
            )));
        }
        if commit != self.commit {
            return Err(Failure::Other(format!(
                "the revision moved from commit {} to {commit} meanwhile; run again",
                self.commit
            )));
        }
        Ok(metadata)
    }

    fn repo(&self) -> ApiRepo {
        let RepoSpec {
            kind,
            repo_id,
            revision,
        } = self.spec.clone();
        let kind = match kind {
            RepoKind::Model => RepoType::Model,
            RepoKind::Dataset => RepoType::Dataset,
        };
        self.api.repo(Repo::with_revision(repo_id, kind, revision))
    }

    /// Where there is no terminal for a bar, lines say what is going on, and how much of the file is there, `partial`.
    fn announce(&self, file: &str, size: u64, partial: PathBuf) -> Option<Activity> {
        if !is_weights(Path::new(file)) || io::stderr().is_terminal() {
            return None;
        }
        let _ = writeln!(
            io::stderr(),
            "fetching {file} of {}, {:.1} MB",
            self.spec,
            size as f64 / 1e6
        );
        let name = format!("fetching {file}");
        let done = move || file_len(&partial);
        Some(Activity::of_bytes_by(&name, Some(size), done))
    }

    /// The error of a request for `file`.
    fn error(&self, file: &str, failure: Failure) -> Error {
        let HubConfig {
            endpoint, token, ..
        } = self.config;
        let RepoSpec {
            kind,
            repo_id,
            revision,
        } = self.spec;
        let what =
            format!("cannot fetch {file} of {repo_id} (revision {revision}) from {endpoint}");
        let page = match kind {
            RepoKind::Model => format!("{endpoint}/{repo_id}"),
            RepoKind::Dataset => format!("{endpoint}/datasets/{repo_id}"),
        };
        Error::msg(match failure {
            Failure::Status(401) if token.is_none() => format!(
                "{what}: the hub asks for a token (status 401): the {kind} is gated or private, or does not exist, and there is no folder {repo_id:?} here\nhint: check the name; for a gated {kind} accept its terms at {page} and set HF_TOKEN"
            ),
            Failure::Status(401) => format!(
                "{what}: the hub does not accept the token (status 401)\nhint: HF_TOKEN (or the token file) must hold a valid token with read access to {page}"
            ),
            Failure::Status(403) => format!(
                "{what}: access is denied (status 403): the {kind} is gated\nhint: accept its terms at {page} and set HF_TOKEN to a token of that account"
            ),
            Failure::Status(404) => format!(
                "{what}: there is no such {kind}, revision or file (status 404), and no folder {repo_id:?} here\nhint: check the name and the revision at {page}; a private {kind} needs HF_TOKEN"
            ),
            Failure::Status(status) => {
                format!("{what}: the hub answered with status {status}\nhint: try again later")
            }
            Failure::Other(reason) => format!(
                "{what}: {reason}; and there is no folder {repo_id:?} here\nhint: check the network and HF_ENDPOINT and run again (a broken download is continued); HF_HUB_OFFLINE=1 uses what is in {:?}",
                self.config.cache_dir
            ),
        })
    }
}

fn client(config: &HubConfig) -> Result<Api> {
    let api = ApiBuilder::from_cache(Cache::new(config.cache_dir.clone()))
        .with_endpoint(config.endpoint.clone())
        .with_token(config.token.clone())
        .with_progress(io::stderr().is_terminal())
        .build();
    match api {
        Ok(api) => Ok(api),
        Err(e) => bail!("cannot set up the client of {}: {e}", config.endpoint),
    }
}

/// The right to fetch this repository into this cache: hf-hub's own locks, one per file, are waited for five seconds only.
fn lock_of(cache_dir: &Path, spec: &RepoSpec) -> Option<File> {
    let name = format!("candle-train--{}.lock", spec.repo_id.replace('/', "--"));
    lock(&cache_dir.join(".locks").join(name), || {
        tracing::info!("waiting for another process that fetches {spec}");
    })
}

fn is_weights(file: &Path) -> bool {
    file.extension()
        .is_some_and(|ending| ending == "safetensors")
}

/// The size of a file; of one that is not there it is 0.
fn file_len(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn remove(path: &Path) -> std::result::Result<(), Failure> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Failure::Other(format!(
            "cannot remove {path:?} from the cache: {e}"
        ))),
        _ => Ok(()),
    }
}

/// Whether the file at `path` is whole, which hf-hub does not look at. Weights have exactly `size` bytes; what was compressed on
/// its way is longer, and a part of a JSON file cannot be parsed.
fn check(path: &Path, size: u64) -> std::result::Result<(), String> {
    let len = file_len(path);
    if len < size || is_weights(path) && len > size {
        return Err(format!("{len} bytes arrived, expected {size}"));
    }
    if path.extension().is_some_and(|ending| ending == "json") {
        let bytes = fs::read(path).map_err(|e| e.to_string())?;
        serde_json::from_slice::<serde::de::IgnoredAny>(&bytes)
            .map_err(|e| format!("what arrived is not valid JSON: {e}"))?;
    }
    Ok(())
}

/// Links the snapshot's `path`, that of `file`, to `blob`: two folders up from the snapshot's own, in `blobs`.
fn link(blob: &Path, path: &Path, file: &str) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), blob.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(dir)?;
    let up = "../".repeat(1 + Path::new(file).components().count());
    symlink(Path::new(&up).join("blobs").join(name), path)
}
