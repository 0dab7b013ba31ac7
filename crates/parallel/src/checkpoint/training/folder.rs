//! The folder that holds the checkpoints of a run: names, who may write there, what is removed.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{Error, Result};

use super::manifest::Manifest;
use crate::checkpoint::staged_folder::beside;
use crate::checkpoint::{FolderLock, StagedFolder};

const PREFIX: &str = "step-";
/// A checkpoint that is being removed: `.NAME.removed`.
const REMOVED: &str = "removed";

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub(super) struct CheckpointFolder(PathBuf);

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
    pub fn lock(&self) -> Result<FolderLock> {
        std::fs::create_dir_all(&self.0).map_err(|err| self.error("make", &err))?;
        let lock = FolderLock::acquire_inside(&self.0).map_err(|err| self.error("use", &err))?;
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
        Ok(lock)
    }

    /// Begins the checkpoint after `step` steps. One of ours that has its name is replaced by it in the end.
    pub fn stage(&self, step: usize) -> Result<StagedFolder> {
        let path = self.path(step);
        if path.exists() {
            Manifest::read(&path).map_err(|err| {
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

    /// Takes their names from the older ones of the checkpoints up to `step`, but for the newest `keep`; returns the folders, which are to
    /// be removed.
    pub fn hide_old(&self, step: usize, keep: usize) -> Result<Vec<PathBuf>> {
        let steps = self.steps()?.into_iter();
        let ours =
            steps.filter(|&other| other <= step && Manifest::read(&self.path(other)).is_ok());
        let old: Vec<usize> = ours.skip(keep).collect();
        let hidden = old.into_iter().map(|step| {
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
