//! Files of tokens that were made before, by what they were made of.

use std::fs::{self, DirEntry, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{BufWriter, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use candle_core::{Result, bail};
use candle_parallel::checkpoint::{open_file, open_own_file};
use twox_hash::XxHash3_128;

use super::record_encoder::RecordEncoder;
use super::token_list::Tokens;
use crate::activity::Activity;
use crate::records::Data;

/// Counts the ways in which records were made tokens, so that none is taken for another.
const VERSION: u32 = 6;

/// Files that no run has used for so long are removed when another one is made.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// How names of files end that are not whole.
const PARTIAL: &str = ".partial";

/// A folder of files of tokens.
#[derive(Clone, Debug)]
pub struct TokenCache {
    dir: PathBuf,
    is_read_only: bool,
}

/// The right to write a file, until it is dropped or the process ends.
pub(crate) struct CacheLock {
    _file: Option<File>,
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
        let num_read = Arc::new(AtomicU64::new(0));
        let counter = num_read.clone();
        let _reading = Activity::of_bytes("reading the data", Some(data.num_bytes()?), move || {
            counter.load(Ordering::Relaxed)
        });
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

    /// Removes what runs that were killed have left of the file of this name. Who writes one has locked it.
    fn remove_abandoned(&self, key: &str) {
        let is_partial = |entry: &DirEntry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let rest = name.strip_prefix('.').and_then(|it| it.strip_prefix(key));
            rest.is_some_and(|rest| rest.ends_with(PARTIAL))
        };
        for entry in self.entries().filter(is_partial) {
            let file = open_own_file(&entry.path(), File::options().write(true));
            if file.is_ok_and(|file| file.try_lock().is_ok()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// The mode of its files. The data may be nobody else's business, and so are its tokens; but a folder in which others may write is shared.
    fn mode(&self) -> std::io::Result<u32> {
        let is_shared = self.dir.metadata()?.mode() & 0o022 != 0;
        Ok(if is_shared { 0o644 } else { 0o600 })
    }

    fn entries(&self) -> impl Iterator<Item = DirEntry> + use<> {
        fs::read_dir(&self.dir).into_iter().flatten().flatten()
    }

    /// Removes what has not been used for long, and what killed processes have left. What cannot be removed stays.
    fn remove_unused(&self) {
        let is_unused = |entry: &DirEntry| {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > UNUSED))
        };
        for entry in self.entries().filter(is_unused) {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Waits until no other process writes the file of this name. Where there can be no lock it goes on without: files get their
    /// names when they are whole.
    pub(crate) fn lock(&self, key: &str) -> CacheLock {
        if self.is_read_only {
            return CacheLock { _file: None };
        }
        let path = self.dir.join(format!(".{key}.lock"));
        let open = || {
            let mut options = File::options();
            let options = options.write(true).create(true);
            open_own_file(&path, options.truncate(false))
        };
        let file = fs::create_dir_all(&self.dir).and_then(|()| open());
        let locked = file.and_then(|file| file.lock().map(|()| file));
        CacheLock { _file: locked.ok() }
    }

    /// Has `write` write the file of this name, which is there once it is whole; `None` if there can be none.
    ///
    /// # Errors
    /// Those of `write`.
    pub(crate) fn create(
        &self,
        key: &str,
        write: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
    ) -> Result<Option<Tokens>> {
        if self.is_read_only {
            return Ok(None);
        }
        self.remove_abandoned(key);
        let partial = self.dir.join(format!(
            ".{key}.{:016x}{PARTIAL}",
            RandomState::new().hash_one(key)
        ));
        let mut options = File::options();
        let options = options.write(true).create_new(true);
        let made =
            fs::create_dir_all(&self.dir).and_then(|()| options.mode(self.mode()?).open(&partial));
        let Ok(file) = made else {
            return Ok(None);
        };
        // On a file system without locks nobody can tell that it is abandoned.
        let _ = file.try_lock();
        let mut writer = BufWriter::new(file);
        let written = write(&mut writer);
        let kept = || -> std::io::Result<()> {
            writer
                .into_inner()
                .map_err(|err| err.into_error())?
                .sync_all()?;
            fs::rename(&partial, self.path(key))?;
            let _ = fs::remove_file(self.dir.join(format!(".{key}.lock")));
            Ok(())
        };
        match written {
            Ok(()) if kept().is_ok() => {
                self.remove_unused();
                Ok(self.open(key))
            }
            result => {
                // What is left of the attempt is worth less than how it ended.
                let _ = fs::remove_file(&partial);
                result.map(|()| None)
            }
        }
    }
}
