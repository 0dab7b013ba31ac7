//! One repository in the cache: which commits are there, and whether completely.
//!
//! Layout of the standard cache: `models--org--name/refs/REVISION` holds a commit, `snapshots/COMMIT/FILE` is a link into
//! `blobs/`. Of a snapshot that was fetched here, `.files/COMMIT` has the hub's list of the commit's files.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use candle_parallel::checkpoint::WholeFile;

use super::repo_spec::{RepoSpec, is_name};
use super::weight_index::read_shard_names;

/// Files without which a model cannot be trained, fetched before the weights.
pub(super) const REQUIRED_FILES: [&str; 2] = ["config.json", "tokenizer.json"];
/// The chat template.
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Folder of further ones, which a model with that may have.
pub(super) const MORE_CHAT_TEMPLATES: &str = "additional_chat_templates/";
/// Files that a model may lack.
pub(super) const OPTIONAL_FILES: [&str; 8] = [
    CHAT_TEMPLATE,
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
];
/// Weights in one file.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// Index of weights in several files.
pub(super) const WEIGHT_INDEX: &str = "model.safetensors.index.json";

/// What is wanted of a model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    /// Everything.
    Weights,
    /// Everything but the weights.
    Tokenizer,
}

/// A repository's folder in the cache.
pub(super) struct Snapshots {
    dir: PathBuf,
}

impl Snapshots {
    pub(super) fn new(cache_dir: &Path, spec: &RepoSpec) -> Self {
        Self {
            dir: cache_dir.join(format!(
                "{}s--{}",
                spec.kind,
                spec.repo_id.replace('/', "--")
            )),
        }
    }

    /// Folder of `commit`'s files.
    pub(super) fn dir(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    /// Where the content with this tag is.
    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }

    /// The commit that the revision named when the hub was last asked.
    pub(super) fn commit(&self, spec: &RepoSpec) -> Option<String> {
        if spec.is_commit() {
            return Some(spec.revision.clone());
        }
        let commit = fs::read_to_string(self.reference(spec)).ok()?;
        Some(commit.trim().to_string()).filter(|commit| is_name(commit))
    }

    /// Where the commit of the revision is noted.
    pub(super) fn reference(&self, spec: &RepoSpec) -> PathBuf {
        self.dir.join("refs").join(&spec.revision)
    }

    /// Records that the revision names `commit` now.
    pub(super) fn set_commit(&self, spec: &RepoSpec, commit: &str) -> io::Result<()> {
        let path = self.reference(spec);
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        WholeFile::replace(&path, commit.as_bytes())
    }

    /// The commit of the revision's snapshot, or the name of the first file that the snapshot lacks.
    pub(super) fn complete(&self, spec: &RepoSpec, needs: Needs) -> Result<String, String> {
        let Some(commit) = self.commit(spec) else {
            return Err("any file of it".to_string());
        };
        let dir = self.dir(&commit);
        let mut files: Vec<String> = REQUIRED_FILES.map(String::from).to_vec();
        if needs == Needs::Tokenizer {
            // Those are all.
        } else if !dir.join(WEIGHTS).exists() && dir.join(WEIGHT_INDEX).exists() {
            let shards = read_shard_names(&dir.join(WEIGHT_INDEX));
            files.extend(shards.map_err(|_| WEIGHT_INDEX.to_string())?);
        } else {
            files.push(WEIGHTS.to_string());
        }
        match files.into_iter().find(|file| !dir.join(file).exists()) {
            None => Ok(commit),
            Some(missing) => Err(missing),
        }
    }

    /// The files of `commit`, as the hub has listed them.
    pub(super) fn listed(&self, commit: &str) -> Option<Vec<String>> {
        let list = fs::read_to_string(self.list(commit)).ok()?;
        Some(list.lines().map(str::to_string).collect())
    }

    /// The files of `commit` that another program has fetched; `None` if one of the repository is not whole.
    pub(super) fn there(&self, commit: &str) -> Option<Vec<String>> {
        let blobs = fs::read_dir(self.dir.join("blobs")).ok()?.flatten();
        let is_partial = |name: &OsStr| {
            let end = Path::new(name).extension();
            end.is_some_and(|end| end == "incomplete" || end == "part")
        };
        if blobs.into_iter().any(|blob| is_partial(&blob.file_name())) {
            return None;
        }
        let root = self.dir(commit);
        let (mut files, mut folders) = (Vec::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).ok()?.flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.exists() {
                    files.push(path.strip_prefix(&root).ok()?.to_str()?.to_string());
                } else {
                    // Its content was not fetched, or was removed.
                    return None;
                }
            }
        }
        files.sort();
        has_all_parts(&files).then_some(files)
    }

    /// Records the files of `commit`. Failing to costs a request next time, nothing else.
    pub(super) fn set_listed(&self, commit: &str, files: &[String]) {
        let path = self.list(commit);
        if let Some(dir) = path.parent()
            && fs::create_dir_all(dir).is_ok()
        {
            let _ = WholeFile::replace(&path, files.join("\n").as_bytes());
        }
    }

    fn list(&self, commit: &str) -> PathBuf {
        self.dir.join(".files").join(commit)
    }
}

/// Whether of files that are named as parts of a whole, such as `train-00000-of-00002.parquet`, none is missing.
fn has_all_parts(files: &[String]) -> bool {
    let part = |file: &String| {
        let (before, after) = file.rsplit_once("-of-")?;
        let (name, _) = before.rsplit_once('-')?;
        let digits = after.split(|c: char| !c.is_ascii_digit()).next()?;
        let number: usize = digits.parse().ok()?;
        Some((format!("{name}{}", &after[digits.len()..]), number))
    };
    let mut parts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (name, number) in files.iter().filter_map(part) {
        let (found, expected) = parts.entry(name).or_default();
        *found += 1;
        *expected = number.max(*expected);
    }
    let mut parts = parts.values();
    parts.all(|(found, expected)| found >= expected)
}
