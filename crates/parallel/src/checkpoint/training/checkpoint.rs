//! A checkpoint that was found whole, opened.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_comm::{ProcessGroup, message_of};
use candle_core::{Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::folder::{CheckpointFolder, LockedFolder};
use super::manifest::CheckpointManifest;
use super::rank_file::RankFile;
use crate::agreement::{agree, exchange};
use crate::view::View;

/// What rank 0 says, on every rank; or, if some failed, one message for all. Every rank must call it.
pub(super) fn of_first<T: Default + Serialize + DeserializeOwned>(
    world: &ProcessGroup,
    own: Result<T>,
) -> Result<std::result::Result<T, String>> {
    let said = exchange(world, &own.map_err(|err| message_of(&err)))?;
    Ok(said.map(|of_ranks| of_ranks.into_iter().next().unwrap_or_default()))
}

/// A training checkpoint, from which a run of any layout resumes.
pub struct TrainingCheckpoint {
    dir: PathBuf,
    pub(super) manifest: CheckpointManifest,
    pub(super) files: Vec<RankFile>,
    /// Of each parameter, its pieces: (file, piece of it).
    pub(super) pieces: HashMap<String, Vec<(usize, View)>>,
    /// Whether all newer ones beside it are not valid.
    pub(super) is_latest: bool,
    /// On rank 0, if it is the latest: nothing changes in the folder between the look and the first save.
    pub(super) lock: Option<Arc<LockedFolder>>,
}

impl TrainingCheckpoint {
    /// Where the checkpoint after `step` steps is in a folder of checkpoints, if it is there.
    pub fn path(save_dir: &Path, step: usize) -> PathBuf {
        CheckpointFolder::new(save_dir).path(step)
    }

    /// Opens the checkpoint in folder `dir`. The ranks divide its files between them and compare their checksums, so each file is read
    /// once. Every rank of `world` must call it.
    ///
    /// # Errors
    /// The same on every rank: a folder that is no checkpoint, a file that is missing, truncated, changed or of another run.
    pub fn open(world: &ProcessGroup, dir: &Path) -> Result<Self> {
        agree(world, Self::verify(world, dir))
    }

    /// The newest valid checkpoint in `save_dir`, or `None` if there is none at all; and why newer ones were skipped. What a killed save
    /// has left there is finished or removed first, and no other run writes there while the result lives. Every rank must call it.
    ///
    /// # Errors
    /// There are checkpoints, but none is valid, or another run writes there.
    pub fn latest(world: &ProcessGroup, save_dir: &Path) -> Result<(Option<Self>, Vec<String>)> {
        Self::newest(world, save_dir, true)
    }

    /// As [`Self::latest`], to see what there is: nothing is changed, and another run may write there a moment later.
    ///
    /// # Errors
    /// As [`Self::latest`].
    pub fn look(world: &ProcessGroup, save_dir: &Path) -> Result<(Option<Self>, Vec<String>)> {
        Self::newest(world, save_dir, false)
    }

    fn newest(
        world: &ProcessGroup,
        save_dir: &Path,
        locks: bool,
    ) -> Result<(Option<Self>, Vec<String>)> {
        // What rank 0 sees counts: other hosts may see a folder later.
        let folder = CheckpointFolder::new(save_dir);
        let mut lock = None;
        let mut look = || {
            match locks {
                true => lock = folder.lock_to_read()?.map(Arc::new),
                false => folder.check_free()?,
            }
            folder.steps()
        };
        let steps = match world.rank() {
            0 => look(),
            _ => Ok(Vec::new()),
        };
        let steps = of_first(world, steps)?.map_err(candle_core::Error::msg)?;
        let mut skipped = Vec::new();
        for step in steps {
            let checkpoint = Self::verify(world, &folder.path(step));
            let said = checkpoint.as_ref().map(|_| ()).map_err(message_of);
            match (exchange(world, &said)?, checkpoint) {
                (Ok(_), Ok(checkpoint)) => {
                    let latest = Self {
                        is_latest: true,
                        lock,
                        ..checkpoint
                    };
                    return Ok((Some(latest), skipped));
                }
                (Err(message), _) | (_, Err(candle_core::Error::Msg(message))) => {
                    skipped.push(message);
                }
                (Ok(_), Err(err)) => return Err(err),
            }
        }
        if let Some(first) = skipped.first() {
            bail!(
                "none of the {} checkpoints in {} is valid; the newest: {first}",
                skipped.len(),
                save_dir.display()
            );
        }
        Ok((None, skipped))
    }

    /// Compares the sizes of all files and the checksums of this rank's share of them, and opens them.
    fn verify(world: &ProcessGroup, dir: &Path) -> Result<Self> {
        let manifest = CheckpointManifest::read(dir)?;
        manifest.check_files(dir)?;
        let records = manifest.files.iter();
        records.clone().try_for_each(|file| file.check_size(dir))?;
        let mine = records.clone().skip(world.rank());
        let mut mine = mine.step_by(world.world_size());
        mine.try_for_each(|file| file.check_sum(dir))?;
        let of_ranks = records.filter(|file| file.is_of_rank());
        let files = of_ranks.map(|file| RankFile::open(&dir.join(&file.name), &manifest));
        let files: Vec<RankFile> = files.collect::<Result<_>>()?;
        let mut pieces: HashMap<String, Vec<(usize, View)>> = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for piece in &file.pieces {
                manifest.check_piece(dir, piece)?;
                let of_param = pieces.entry(piece.name.clone()).or_default();
                of_param.push((index, piece.clone()));
            }
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            manifest,
            files,
            pieces,
            is_latest: false,
            lock: None,
        })
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The run that wrote it.
    pub fn run(&self) -> &str {
        &self.manifest.run
    }

    /// Steps that were done.
    pub fn step(&self) -> usize {
        self.manifest.step
    }

    /// What the caller of [`CheckpointSaver::start`](super::CheckpointSaver::start) added.
    pub fn record(&self) -> &serde_json::Value {
        &self.manifest.record
    }

    /// What it holds.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifest
    }
}
