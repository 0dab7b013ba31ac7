//! Files of tokens that were made before, by what they were made of.

use std::fs::{self, DirEntry, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use candle_core::{Result, bail};
use candle_parallel::checkpoint::{WholeFile, open_file, open_own_file};
use twox_hash::XxHash3_128;

use super::record_encoder::RecordEncoder;
use super::token_list::Tokens;
use crate::activity::Activity;
use crate::own_lock::lock;
use crate::records::Data;

/// Counts the ways in which records were made tokens, so that none is taken for another.
const VERSION: u32 = 7;

/// Files that no run has used for so long are removed when another one is made.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// A folder of files of tokens.
#[derive(Clone, Debug)]
pub struct TokenCache {
    dir: PathBuf,
    is_read_only: bool,
}

impl TokenCache {
    /// In the folder `tokens` of `dir`, which need not be there.
    pub fn new(dir: impl AsRef<Path>) -> Self {
        Self {
            dir: dir.as_ref().join("tokens"),
            is_read_only: false,
        }
    }

    /// The same, in which nothing is changed.
    pub fn read_only(self) -> Self {
        Self {
            is_read_only: true,
            ..self
        }
    }

    /// In `CANDLE_TRAIN_CACHE`, else in `candle-train` of `XDG_CACHE_HOME`, else of `~/.cache`; `None` if none is set, or the first is empty.
    pub fn from_env() -> Option<Self> {
        let var = |name: &str| std::env::var_os(name);
        let of_user = || {
            let cache = var("XDG_CACHE_HOME")
                .filter(|dir| !dir.is_empty())
                .map(PathBuf::from);
            let cache = cache.or_else(|| Some(PathBuf::from(var("HOME")?).join(".cache")));
            cache.map(|cache| cache.join("candle-train"))
        };
        let dir = match var("CANDLE_TRAIN_CACHE") {
            Some(dir) => Some(PathBuf::from(dir)).filter(|dir| !dir.as_os_str().is_empty()),
            None => of_user(),
        };
        dir.map(Self::new)
    }

    /// The name of the tokens that `encoder` makes of `data`: a checksum of everything that decides them.
    pub(crate) fn key(data: &Data, encoder: &RecordEncoder<'_>) -> Result<String> {
        let mut hash = XxHash3_128::new();
        let mut block = vec![0; 1 << 20];
        let num_read: Arc<AtomicU64> = Arc::default();
        let total = Some(data.num_bytes()?);
        let _reading = Activity::of_bytes("reading the data", total, num_read.clone());
        for file in &data.files {
            let opened = open_file(&file.path).and_then(|file| Ok((file.metadata()?.len(), file)));
            let mut opened = match opened {
                // What grows meanwhile, such as a log, has an end.
                Ok((len, opened)) => opened.take(len),
                Err(err) => bail!("cannot open data {:?}: {err}", file.path),
            };
            let mut len = 0u64;
            loop {
                match opened.read(&mut block) {
                    Ok(0) => break,
                    Ok(count) => {
                        hash.write(&block[..count]);
                        len += count as u64;
                        num_read.fetch_add(count as u64, Ordering::Relaxed);
                    }
                    Err(err) => bail!("cannot read data file {:?}: {err}", file.path),
                }
            }
            hash.write(format!("{len} {:?} {}", file.format, file.source).as_bytes());
        }
        hash.write(format!("{:?}", data.columns).as_bytes());
        hash.write(encoder.identity()?.as_bytes());
        hash.write(format!("{VERSION} {}", env!("CARGO_PKG_VERSION")).as_bytes());
        Ok(format!("{:032x}", hash.finish_128()))
    }

    fn path(&self, key: &str) -> PathBuf {
        self.dir.join(format!("{key}.tokens"))
    }

    /// The tokens of this name, if they are there and whole. A file that is damaged is told and removed.
    pub(crate) fn open(&self, key: &str) -> Option<Tokens> {
        let path = self.path(key);
        let file = open_own_file(&path, File::options().read(true)).ok()?;
        // How long it has not been used; whoever may not write this has another's cache.
        if !self.is_read_only {
            let _ = file.set_modified(SystemTime::now());
        }
        let _checking = Activity::start("checking the cached tokens");
        match Tokens::open(file) {
            Ok(tokens) => Some(tokens),
            Err(_) if self.is_read_only => None,
            Err(err) => {
                tracing::warn!(
                    "the cached tokens {} are damaged and are made again: {err}",
                    path.display()
                );
                let _ = fs::remove_file(path);
                None
            }
        }
    }

    /// The mode of its files. The data may be nobody else's business, and so are its tokens; but a folder in which others may write is shared.
    fn mode(&self) -> std::io::Result<u32> {
        let is_shared = self.dir.metadata()?.mode() & 0o022 != 0;
        Ok(if is_shared { 0o644 } else { 0o600 })
    }

    /// Removes what has not been used for long, and what killed processes have left. What cannot be removed stays.
    fn remove_unused(&self) {
        let is_unused = |entry: &DirEntry| {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > UNUSED))
        };
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for entry in entries.filter(is_unused) {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Waits until no other process writes the file of this name.
    pub(crate) fn lock(&self, key: &str) -> Option<File> {
        if self.is_read_only {
            return None;
        }
        let mut _waiting = None;
        lock(&self.lock_path(key), || {
            _waiting = Some(Activity::start(
                "waiting for another run that tokenizes this data",
            ));
        })
    }

    fn lock_path(&self, key: &str) -> PathBuf {
        self.dir.join(format!(".{key}.lock"))
    }

    /// Has `write` write the file of this name, which is there once it is whole; `None` if there can be none.
    ///
    /// # Errors
    /// Those of `write`.
    pub(crate) fn create(
        &self,
        key: &str,
        write: impl FnOnce(&mut WholeFile) -> Result<()>,
    ) -> Result<Option<Tokens>> {
        if self.is_read_only {
            return Ok(None);
        }
        let path = self.path(key);
        // A link to a folder would not be replaced.
        if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
            let _ = fs::remove_file(&path);
        }
        let made =
            fs::create_dir_all(&self.dir).and_then(|()| WholeFile::with_mode(&path, self.mode()?));
        let Ok(mut file) = made else {
            return Ok(None);
        };
        write(&mut file)?;
        if file.commit().is_err() {
            return Ok(None);
        }
        let _ = fs::remove_file(self.lock_path(key));
        self.remove_unused();
        Ok(self.open(key))
    }
}
