//! The folder that holds the checkpoints of a run: names, who may write there, what is removed.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{Error, Result};
use nix::unistd::{AccessFlags, access};

use super::manifest::CheckpointManifest;
use crate::checkpoint::output_folder::NewFolders;
use crate::checkpoint::staged_folder::beside;
use crate::checkpoint::{FolderLock, StagedFolder};

const PREFIX: &str = "step-";
/// A checkpoint that is being removed: `.NAME.removed`.
const REMOVED: &str = "removed";

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub(super) struct CheckpointFolder(PathBuf);

/// The right to write there, which no other run has while this lives. When it is dropped, no new empty folder stays.
#[derive(Debug)]
pub(super) struct LockedFolder {
    folder: PathBuf,
    // Before the folders, which stay if there is something in them, as fields are dropped in this order.
    lock: FolderLock,
    _made: NewFolders,
}

impl LockedFolder {
    pub fn is_of(&self, folder: &CheckpointFolder) -> bool {
        self.folder == folder.0
    }

    /// Whether nobody has removed the folder, or its lock.
    pub fn is_held(&self) -> bool {
        self.lock.is_held()
    }
}

/// The folders in `save_dir` that have the name of a training checkpoint, the newest first; none if it does not exist. Whether they are
/// valid [`CheckpointManifest::read`] tells.
///
/// # Errors
/// It cannot be read.
pub fn checkpoints_in(save_dir: &Path) -> Result<Vec<PathBuf>> {
    let folder = CheckpointFolder::new(save_dir);
    let steps = folder.steps()?.into_iter();
    Ok(steps.map(|step| folder.path(step)).collect())
}

impl CheckpointFolder {
    pub fn new(dir: &Path) -> Self {
        Self(dir.to_path_buf())
    }

    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Where the checkpoint after `step` steps is.
    pub fn path(&self, step: usize) -> PathBuf {
        self.0.join(name(step))
    }

    /// The steps of all folders with the name of a checkpoint, the newest first; none if the folder does not exist.
    pub fn steps(&self) -> Result<Vec<usize>> {
        let names = self.names()?.into_iter();
        let mut steps: Vec<usize> = names.filter_map(|name| step_of(&name)).collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        Ok(steps)
    }

    fn names(&self) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(err) if err.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(err) => return Err(self.error("read", &err)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|err| self.error("read", &err))?;
            if entry.path().is_dir() {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        Ok(names)
    }

    fn error(&self, what: &str, err: &std::io::Error) -> Error {
        Error::msg(format!(
            "cannot {what} the checkpoint folder {}: {err}",
            self.0.display()
        ))
    }

    /// Makes the folder, keeps other runs out of it while the result lives, and removes what a killed save left.
    pub fn lock(&self) -> Result<LockedFolder> {
        let made = NewFolders::create(&self.0);
        // Fails if it is a file.
        let made = made.and_then(|made| std::fs::create_dir_all(&self.0).map(|()| made));
        let made = made.map_err(|err| self.error("make", &err))?;
        let lock = FolderLock::acquire_inside(&self.0).map_err(|err| self.error("use", &err))?;
        self.clean()?;
        Ok(LockedFolder {
            folder: self.0.clone(),
            lock,
            _made: made,
        })
    }

    /// As [`Self::lock`], if there is such a folder and this process may write there.
    pub fn lock_to_read(&self) -> Result<Option<LockedFolder>> {
        let is_writable = self.0.is_dir() && access(&self.0, AccessFlags::W_OK).is_ok();
        is_writable.then(|| self.lock()).transpose()
    }

    fn clean(&self) -> Result<()> {
        for name in self.names()? {
            let hidden = name.strip_prefix('.').and_then(|name| name.split_once('.'));
            let Some((step, role)) = hidden.and_then(|(name, role)| Some((step_of(name)?, role)))
            else {
                continue;
            };
            let cleaned = match role {
                REMOVED => std::fs::remove_dir_all(self.0.join(&name)),
                _ => StagedFolder::recover(&self.path(step)),
            };
            cleaned.map_err(|err| self.error("clean", &err))?;
        }
        Ok(())
    }

    /// Begins the checkpoint after `step` steps. One of ours that has its name is replaced by it in the end.
    pub fn stage(&self, step: usize) -> Result<StagedFolder> {
        let path = self.path(step);
        if path.exists() {
            CheckpointManifest::read(&path).map_err(|err| {
                err.context(format!(
                    "{} exists and is not replaced, as it is no checkpoint",
                    path.display()
                ))
            })?;
        }
        StagedFolder::create(&path).map_err(|err| {
            Error::msg(format!(
                "cannot begin the checkpoint {}: {err}",
                path.display()
            ))
        })
    }

    /// Takes their names from the older ones of the checkpoints up to `step`, but for the newest `keep` and the one with the least
    /// evaluation loss; returns the folders, which are to be removed.
    pub fn hide_old(&self, step: usize, keep: usize) -> Result<Vec<PathBuf>> {
        let steps = self.steps()?.into_iter().filter(|&other| other <= step);
        let ours = steps.filter_map(|step| {
            let manifest = CheckpointManifest::read(&self.path(step)).ok()?;
            Some((step, manifest.eval_loss))
        });
        let ours: Vec<(usize, Option<f64>)> = ours.collect();
        let evaluated = ours.iter().filter_map(|&(step, loss)| Some((step, loss?)));
        let best = evaluated.min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        let best = best.map(|(step, _)| step);
        let old = ours.into_iter().skip(keep).map(|(step, _)| step);
        let old = old.filter(|&step| Some(step) != best);
        let hidden = old.map(|step| {
            self.hide(step).map_err(|err| {
                let path = self.path(step);
                Error::msg(format!(
                    "cannot remove the old checkpoint {}: {err}",
                    path.display()
                ))
            })
        });
        hidden.collect()
    }

    /// Takes the name from a checkpoint that is to be removed: at no moment a part of it has it.
    fn hide(&self, step: usize) -> std::io::Result<PathBuf> {
        let path = self.path(step);
        let hidden = beside(&path, REMOVED)?;
        std::fs::rename(path, &hidden)?;
        Ok(hidden)
    }
}

fn name(step: usize) -> String {
    format!("{PREFIX}{step:06}")
}

/// The number of steps in the name of a checkpoint's folder.
fn step_of(folder: &str) -> Option<usize> {
    let step = folder.strip_prefix(PREFIX)?.parse().ok()?;
    (name(step) == folder).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::{name, step_of};

    #[test]
    fn names_of_folders() {
        for step in [0, 15, 999_999, 1_000_000] {
            assert_eq!(step_of(&name(step)), Some(step));
        }
        for other in [
            "step-15",
            "step-0000015",
            "step-+00015",
            "step-",
            ".step-000015",
            "15",
        ] {
            assert_eq!(step_of(other), None, "{other}");
        }
    }
}
