//! The folder that holds the checkpoints of a run: names, who may write there, what is removed.

use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use candle_comm::message_of;
use candle_core::{Error, Result};
use nix::unistd::{AccessFlags, access};

use super::manifest::CheckpointManifest;
use crate::checkpoint::output_folder::NewFolders;
use crate::checkpoint::staged_folder::beside;
use crate::checkpoint::{FolderLock, StagedFolder, check_writable};

const PREFIX: &str = "step-";
/// A checkpoint that is being removed: `.NAME.removed`.
const REMOVED: &str = "removed";
/// Whose weights gave no usual loss, in a run that has failed: `NAME.failed`.
const FAILED: &str = "failed";
/// What is no whole checkpoint, and had the name of one that was to be written: `NAME.damaged`.
const DAMAGED: &str = "damaged";

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

/// The folders in `save_dir` that were checkpoints and are set aside: `step-000015.failed`, whose weights gave no usual loss in a run that
/// has failed, and `step-000015.damaged`, which was not whole. Neither is the latest checkpoint, ever; each can be named to be resumed.
///
/// # Errors
/// It cannot be read.
pub fn set_aside_in(save_dir: &Path) -> Result<Vec<PathBuf>> {
    let folder = CheckpointFolder::new(save_dir);
    let mut names = folder.names()?;
    names.retain(|name| {
        let parts = name.split_once('.');
        parts.is_some_and(|(step, role)| {
            step_of(step).is_some() && (role == FAILED || role.starts_with(DAMAGED))
        })
    });
    names.sort();
    Ok(names.iter().map(|name| save_dir.join(name)).collect())
}

impl CheckpointFolder {
    pub fn new(dir: &Path) -> Self {
        Self(dir.to_path_buf())
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
        cannot(&format!("{what} the checkpoint folder"), &self.0, err)
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

    /// An error if [`Self::lock`] would be one now; nothing is made or changed.
    pub fn check_free(&self) -> Result<()> {
        let checked = check_writable(&self.0);
        let checked = checked.and_then(|()| FolderLock::check_free_inside(&self.0));
        checked.map_err(|err| self.error("use", &err))
    }

    fn clean(&self) -> Result<()> {
        for name in self.names()? {
            let hidden = name
                .strip_prefix('.')
                .and_then(|name| name.rsplit_once('.'));
            let is_ours = |of: &str| step_of(of.split('.').next().unwrap_or(of)).is_some();
            let Some((of, role)) = hidden.filter(|(of, _)| is_ours(of)) else {
                continue;
            };
            let cleaned = match role {
                REMOVED => std::fs::remove_dir_all(self.0.join(&name)),
                _ => StagedFolder::recover(&self.0.join(of)),
            };
            cleaned.map_err(|err| self.error("clean", &err))?;
        }
        Ok(())
    }

    /// Begins the checkpoint after `step` steps. One that has its name is replaced by it in the end; what is none is set aside.
    pub fn stage(&self, step: usize) -> Result<StagedFolder> {
        let path = self.path(step);
        if path.symlink_metadata().is_ok()
            && let Err(damage) = CheckpointManifest::read(&path)
        {
            let aside = self.set_aside_damaged(step).map_err(|err| {
                Error::msg(format!(
                    "{} exists, is no checkpoint, and cannot be set aside: {err}",
                    path.display()
                ))
            })?;
            tracing::warn!(
                "{} was no whole checkpoint, and is {} now: {}",
                path.display(),
                aside.display(),
                message_of(&damage)
            );
        }
        StagedFolder::create(&path).map_err(|err| cannot("begin the checkpoint", &path, &err))
    }

    /// Gives what has the name of the checkpoint after `step` steps, and is none, a name that is free.
    fn set_aside_damaged(&self, step: usize) -> std::io::Result<PathBuf> {
        let path = self.path(step);
        let mut aside = path.with_extension(DAMAGED);
        let mut number = 1;
        while aside.symlink_metadata().is_ok() {
            number += 1;
            aside = path.with_extension(format!("{DAMAGED}-{number}"));
        }
        std::fs::rename(path, &aside)?;
        Ok(aside)
    }

    /// Marks the checkpoints of `run` after so many steps as those of a run that has failed; one that was marked before, and has the name, is
    /// replaced. Returns where they are, the newest first.
    pub fn set_failed_aside(
        &self,
        steps: &RangeInclusive<usize>,
        run: &str,
    ) -> Result<Vec<PathBuf>> {
        let among = self.steps()?.into_iter();
        let steps = among.filter(|step| steps.contains(step) && self.is_of(*step, run));
        let aside = steps.map(|step| {
            let (path, aside) = (self.path(step), self.path(step).with_extension(FAILED));
            let set_aside = || -> std::io::Result<()> {
                if aside.symlink_metadata().is_ok() {
                    std::fs::remove_dir_all(hide(&aside)?)?;
                }
                std::fs::rename(&path, &aside)
            };
            set_aside().map_err(|err| {
                let (path, aside) = (path.display(), aside.display());
                Error::msg(format!("cannot rename {path} to {aside}: {err}"))
            })?;
            Ok(aside)
        });
        aside.collect()
    }

    /// The newest checkpoint of `run`.
    pub fn newest(&self, run: &str) -> Result<Option<PathBuf>> {
        let mut steps = self.steps()?.into_iter();
        let newest = steps.find(|step| self.is_of(*step, run));
        Ok(newest.map(|step| self.path(step)))
    }

    /// Whether there is a checkpoint of `run` after `step` steps, by its manifest.
    fn is_of(&self, step: usize, run: &str) -> bool {
        let manifest = CheckpointManifest::read(&self.path(step));
        manifest.is_ok_and(|manifest| manifest.run == run)
    }

    /// Takes their names from the older ones of the checkpoints of `run` up to `step`, but for the newest `keep`, the one with the least evaluation
    /// loss, and the newest one of fewer than `spared_before` steps; returns the folders, which are to be removed.
    pub fn hide_old(
        &self,
        run: &str,
        step: usize,
        keep: usize,
        spared_before: Option<usize>,
    ) -> Result<Vec<PathBuf>> {
        let steps = self.steps()?.into_iter().filter(|&other| other <= step);
        let ours = steps.filter_map(|step| {
            let manifest = CheckpointManifest::read(&self.path(step)).ok()?;
            (manifest.run == run).then_some((step, manifest.eval_loss))
        });
        let ours: Vec<(usize, Option<f64>)> = ours.collect();
        let evaluated = ours.iter().filter_map(|&(step, loss)| Some((step, loss?)));
        let best = evaluated.min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        let best = best.map(|(step, _)| step);
        let mut steps = ours.iter().map(|(step, _)| *step);
        let spared = spared_before.and_then(|before| steps.find(|&step| step < before));
        let old = ours.iter().skip(keep).map(|(step, _)| *step);
        let old = old.filter(|&step| Some(step) != best && Some(step) != spared);
        let hidden = old.map(|step| {
            let path = self.path(step);
            hide(&path).map_err(|err| cannot("remove the old checkpoint", &path, &err))
        });
        hidden.collect()
    }
}

/// Says that something could not be done to what is at `path`.
pub(super) fn cannot(what: &str, path: &Path, err: &std::io::Error) -> Error {
    Error::msg(format!("cannot {what} {}: {err}", path.display()))
}

/// Takes the name from a checkpoint that is to be removed: at no moment a part of it has it.
fn hide(path: &Path) -> std::io::Result<PathBuf> {
    let hidden = beside(path, REMOVED)?;
    std::fs::rename(path, &hidden)?;
    Ok(hidden)
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
