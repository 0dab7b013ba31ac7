//! Single files from the hub into the cache, resumed and checked.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use candle_core::{Error, Result, bail};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, Metadata};
use hf_hub::{Cache, Repo, RepoType};

use crate::Activity;

use super::repo_spec::RepoKind;
use super::snapshot::Snapshots;
use super::{HubConfig, RepoSpec};

/// Tries per file; a try goes on where the last one was cut off.
const NUM_TRIES: u32 = 3;
/// Pause before the second try; it doubles with each further one.
const RETRY_PAUSE: Duration = Duration::from_millis(300);

/// Why a request failed.
pub(super) enum Failure {
    /// The hub answered with this HTTP status.
    Status(u16),
    /// Anything else: no connection, a connection that broke, a full disk, a file that is not whole.
    Other(String),
}

impl Failure {
    /// True when the same request may succeed later.
    pub(super) fn is_transient(&self) -> bool {
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

/// Fetches one repository's files.
pub(super) struct Fetch<'a> {
    config: &'a HubConfig,
    spec: &'a RepoSpec,
    snapshots: &'a Snapshots,
    api: Api,
    cache: Cache,
    repo: Repo,
}

impl<'a> Fetch<'a> {
    pub(super) fn new(
        config: &'a HubConfig,
        spec: &'a RepoSpec,
        snapshots: &'a Snapshots,
    ) -> Result<Self> {
        let cache = Cache::new(config.cache_dir.clone());
        let api = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(config.endpoint.clone())
            .with_token(config.token.clone())
            .with_progress(io::stderr().is_terminal())
            .build();
        let api = match api {
            Ok(api) => api,
            Err(e) => bail!("cannot set up the client of {}: {e}", config.endpoint),
        };
        let kind = match spec.kind {
            RepoKind::Model => RepoType::Model,
            RepoKind::Dataset => RepoType::Dataset,
        };
        let repo = Repo::with_revision(spec.repo_id.clone(), kind, spec.revision.clone());
        Ok(Self {
            config,
            spec,
            snapshots,
            api,
            cache,
            repo,
        })
    }

    /// The commit that the revision names now, taken from the headers of `file`.
    pub(super) fn commit(&self, file: &str) -> std::result::Result<String, Failure> {
        Ok(self.metadata(file)?.commit_hash().to_string())
    }

    /// The commit that the revision names now, and its files.
    pub(super) fn list(&self) -> std::result::Result<(String, Vec<String>), Failure> {
        let info = self.api.repo(self.repo.clone()).info()?;
        let files = info.siblings.into_iter().map(|file| file.rfilename);
        Ok((info.sha, files.collect()))
    }

    /// Makes `file` of `commit` be in the snapshot; `None` when the commit has no such file.
    pub(super) fn file(&self, commit: &str, file: &str) -> Result<Option<PathBuf>> {
        let path = self.snapshots.dir(commit).join(file);
        if path.exists() {
            return Ok(Some(path));
        }
        if self.snapshots.is_known_absent(commit, file) {
            return Ok(None);
        }
        let mut num_tries = 1;
        loop {
            match self.try_file(commit, file, &path) {
                Ok(()) => return Ok(Some(path)),
                Err(Failure::Status(404)) => {
                    self.snapshots.set_absent(commit, file);
                    return Ok(None);
                }
                Err(failure) if failure.is_transient() && num_tries < NUM_TRIES => {
                    std::thread::sleep(RETRY_PAUSE * 2u32.pow(num_tries - 1));
                    num_tries += 1;
                }
                Err(failure) => return Err(self.error(file, failure)),
            }
        }
    }

    fn try_file(&self, commit: &str, file: &str, path: &Path) -> std::result::Result<(), Failure> {
        let metadata = self.metadata(file)?;
        if metadata.commit_hash() != commit {
            return Err(Failure::Other(format!(
                "the revision moved from commit {commit} to {} meanwhile; run again",
                metadata.commit_hash()
            )));
        }
        let size = metadata.size() as u64;
        let blob = self
            .cache
            .repo(self.repo.clone())
            .blob_path(metadata.etag());
        if blob.exists() {
            // Another commit has the same file: nothing to transfer.
            if file_len(&blob) == Some(size) && link(&blob, path, file).is_ok() {
                return Ok(());
            }
            remove(&blob)?;
        }
        // A link whose target is gone would be in the way of the new one.
        remove(path)?;
        // A partial file that is not shorter than the whole cannot be continued.
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
        if file_len(&partial).is_some_and(|len| len >= size) {
            remove(&partial)?;
        }
        let _activity = self.announce(file, size, partial);
        self.api.repo(self.repo.clone()).download(file)?;
        if let Err(reason) = check(path, size) {
            remove(&blob)?;
            remove(path)?;
            return Err(Failure::Other(reason));
        }
        Ok(())
    }

    fn metadata(&self, file: &str) -> std::result::Result<Metadata, Failure> {
        let metadata = self
            .api
            .metadata(&self.api.repo(self.repo.clone()).url(file))?;
        // Both become parts of paths in the cache.
        for (header, value) in [
            ("ETag", metadata.etag()),
            ("X-Repo-Commit", metadata.commit_hash()),
        ] {
            let is_plain = Path::new(value)
                .components()
                .all(|c| matches!(c, Component::Normal(_)));
            if value.is_empty() || !is_plain {
                return Err(Failure::Other(format!(
                    "the server sent the header {header}: {value:?}"
                )));
            }
        }
        Ok(metadata)
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
        let done = move || file_len(&partial).unwrap_or(0);
        Some(Activity::of_bytes(&name, Some(size), done))
    }

    /// The error of a request for `file`.
    pub(super) fn error(&self, file: &str, failure: Failure) -> Error {
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

    /// Records in the cache that the revision names `commit`.
    pub(super) fn set_commit(&self, commit: &str) -> Result<()> {
        match self.snapshots.set_commit(self.spec, commit) {
            Ok(()) => Ok(()),
            Err(e) => bail!(
                "cannot write to the model cache {:?}: {e}",
                self.config.cache_dir
            ),
        }
    }
}

fn is_weights(file: &Path) -> bool {
    file.extension()
        .is_some_and(|ending| ending == "safetensors")
}

fn file_len(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.len())
}

fn remove(path: &Path) -> std::result::Result<(), Failure> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Failure::Other(format!(
            "cannot remove {path:?} from the cache: {e}"
        ))),
        _ => Ok(()),
    }
}

/// Whether a file holds records that are no JSON as a whole.
fn is_data(file: &Path) -> bool {
    let ending = file.extension().and_then(|ending| ending.to_str());
    matches!(
        ending,
        Some("txt" | "jsonl" | "ndjson" | "csv" | "tsv" | "parquet")
    )
}

/// Whether the file at `path` is whole. Weights have exactly `size` bytes; text may have been compressed on its way, so
/// that `size` says little, but a part of a JSON file cannot be parsed. Of templates and licences any part is valid:
/// there only what is no text is noticed.
fn check(path: &Path, size: u64) -> std::result::Result<(), String> {
    if is_weights(path) {
        return match file_len(path) {
            Some(len) if len == size => Ok(()),
            len => Err(format!(
                "{} bytes arrived, expected {size}",
                len.unwrap_or(0)
            )),
        };
    }
    if is_data(path) {
        // What was compressed on its way is longer.
        return match file_len(path) {
            Some(len) if len >= size => Ok(()),
            len => Err(format!(
                "{} bytes arrived, expected {size}",
                len.unwrap_or(0)
            )),
        };
    }
    let bytes = fs::read(path).map_err(|e| e.to_string())?;
    let is_json = path.extension().is_some_and(|ending| ending == "json");
    if !is_json {
        return match std::str::from_utf8(&bytes) {
            Ok("") if size > 0 => Err(format!("0 bytes arrived, expected {size}")),
            Ok(_) => Ok(()),
            Err(e) => Err(format!("what arrived is not UTF-8: {e}")),
        };
    }
    match serde_json::from_slice::<serde::de::IgnoredAny>(&bytes) {
        Ok(_) => Ok(()),
        Err(e) => Err(format!("what arrived is not valid JSON: {e}")),
    }
}

/// Links the snapshot's `path`, that of `file`, to `blob`: two folders up from the snapshot's own, in `blobs`.
#[cfg(unix)]
fn link(blob: &Path, path: &Path, file: &str) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), blob.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(dir)?;
    if path.symlink_metadata().is_ok() {
        fs::remove_file(path)?;
    }
    let up = "../".repeat(1 + Path::new(file).components().count());
    std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(name), path)
}

/// Links need special rights on this system: the file is fetched once per commit.
#[cfg(not(unix))]
fn link(_blob: &Path, _path: &Path, _file: &str) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
