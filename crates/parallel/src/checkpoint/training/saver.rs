//! Writes checkpoints while training goes on.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use candle_comm::{ProcessGroup, message_of};
use candle_core::{Error, Result, bail};
use serde::{Deserialize, Serialize};

use super::checkpoint::{TrainingCheckpoint, of_first};
use super::folder::{CheckpointFolder, LockedFolder, cannot};
use super::manifest::{CheckpointManifest, CheckpointNote, FileRecord, MANIFEST_FILE, SavedLayout};
use super::rank_file::RankFileWriter;
use super::rank_tensors::{RankTensors, written_weights};
use crate::agreement::{agree, exchange, gather};
use crate::checkpoint::StagedFolder;
use crate::files::SpaceNeed;
use crate::optimizer::DistributedOptimizer;

/// Writes the checkpoints of a run into a folder, one at a time.
pub struct CheckpointSaver {
    world: ProcessGroup,
    folder: CheckpointFolder,
    run: String,
    resumed_step: Option<usize>,
    keep: usize,
    keeps_best: bool,
    removes_on_request: bool,
    sidecars: Arc<Vec<(String, Vec<u8>)>>,
    in_flight: Option<SaveInFlight>,
    /// Removes old checkpoints, which takes a while.
    remover: Option<JoinHandle<()>>,
    /// On rank 0.
    lock: Option<Arc<LockedFolder>>,
}

/// A save whose files are being written.
struct SaveInFlight {
    step: usize,
    /// On rank 0: the folder, and the manifest without its files.
    staged: Option<(StagedFolder, CheckpointManifest)>,
    /// The thread that writes this rank's files, or why they could not even be begun.
    files: std::result::Result<JoinHandle<Written>, String>,
}

type Written = std::result::Result<Vec<FileRecord>, String>;

fn wait(thread: JoinHandle<Written>) -> Written {
    let panicked = |_| Err("the thread that writes panicked".into());
    thread.join().unwrap_or_else(panicked)
}

/// How a save ended, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveOutcome {
    /// Steps that were done before it.
    pub step: usize,
    /// The checkpoint, or why there is none; older ones are as they were then.
    pub saved: std::result::Result<PathBuf, String>,
    /// Why an older checkpoint could not be removed.
    pub warning: Option<String>,
}

/// Checkpoints of a run that has failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SetAside {
    /// Where those are that it may have ruined, the newest first.
    pub failed: Vec<PathBuf>,
    /// The newest one from before.
    pub newest: Option<PathBuf>,
}

impl CheckpointSaver {
    /// Writes to `dir`, where the newest `keep` checkpoints are kept. A run that goes on from `resumed` has its name; a new one
    /// gets a name of its own, and a folder without checkpoints. Every rank must call it.
    ///
    /// # Errors
    /// The same on every rank: a folder that cannot be written to, that another run writes to, or that holds its checkpoints or
    /// newer ones than `resumed`.
    pub fn new(
        world: &ProcessGroup,
        dir: &Path,
        keep: usize,
        resumed: Option<&TrainingCheckpoint>,
    ) -> Result<Self> {
        let folder = CheckpointFolder::new(dir);
        if keep == 0 {
            bail!("0 checkpoints are to be kept; expected at least 1");
        }
        let begin = || -> Result<Option<Arc<LockedFolder>>> {
            if dir.to_str().is_none() {
                bail!(
                    "the name of the checkpoint folder {dir:?} is not UTF-8, in which ranks tell it each other"
                );
            }
            if world.rank() != 0 {
                return Ok(None);
            }
            let held = resumed.and_then(|resumed| resumed.lock.clone());
            let lock = match held.filter(|lock| lock.is_of(&folder)) {
                Some(lock) => lock,
                None => Arc::new(folder.lock()?),
            };
            check_checkpoints(&folder, resumed)?;
            Ok(Some(lock))
        };
        let lock = agree(world, begin())?;
        let run = match resumed {
            Some(resumed) => resumed.run().to_string(),
            None => format!("{:016x}", RandomState::new().hash_one(std::process::id())),
        };
        let run = world.all_gather_bytes(run.as_bytes())?;
        let run = run.first().map(|run| String::from_utf8_lossy(run));
        Ok(Self {
            world: world.clone(),
            folder,
            run: run.unwrap_or_default().into_owned(),
            resumed_step: resumed.map(TrainingCheckpoint::step),
            keep,
            keeps_best: false,
            removes_on_request: false,
            sidecars: Arc::default(),
            in_flight: None,
            remover: None,
            lock,
        })
    }

    /// An error if no checkpoint could be written into the folder `dir` now; nothing is made or changed.
    ///
    /// # Errors
    /// A folder that cannot be written to, or that another run writes to.
    pub fn check_free(dir: &Path) -> Result<()> {
        CheckpointFolder::new(dir).check_free()
    }

    /// What [`Self::new`] would say of the checkpoints in a folder: that there are some already, where a run begins, or others than those of the run
    /// that goes on.
    ///
    /// # Errors
    /// That, and a folder that cannot be read.
    pub fn check_folder(dir: &Path, resumed: Option<&TrainingCheckpoint>) -> Result<()> {
        check_checkpoints(&CheckpointFolder::new(dir), resumed)
    }

    /// Steps that were done before the checkpoint from which the run goes on.
    pub fn resumed_step(&self) -> Option<usize> {
        self.resumed_step
    }

    /// Gives a run that begins this name, the same on every rank, in place of a random one.
    pub fn with_run(mut self, run: &str) -> Self {
        self.run = run.to_string();
        self
    }

    /// Puts these files, which a model has beside its weights, into each checkpoint, for
    /// [`TrainingCheckpoint::export_hf`](super::TrainingCheckpoint::export_hf).
    pub fn with_sidecars(mut self, sidecars: Vec<(String, Vec<u8>)>) -> Self {
        self.sidecars = Arc::new(sidecars);
        self
    }

    /// Reckons with checkpoints that have an evaluation loss, of which the best is kept beside the newest.
    pub fn keeping_best(mut self) -> Self {
        self.keeps_best = true;
        self
    }

    /// Leaves older checkpoints where they are until [`Self::remove_old`]: the newest one's weights may be of no use, which the next step
    /// tells.
    pub fn removing_on_request(mut self) -> Self {
        self.removes_on_request = true;
        self
    }

    /// What the checkpoints of a run take in `dir` beside those that are there: as many as are kept, and the one that is written before the
    /// oldest is removed, each with so many f32 values, masters and state, and sidecars. For
    /// [`check_free_space`](crate::checkpoint::check_free_space).
    pub fn space_need(
        dir: PathBuf,
        num_kept: usize,
        num_values: usize,
        sidecars: &[(String, Vec<u8>)],
    ) -> SpaceNeed {
        let there = CheckpointFolder::new(&dir)
            .steps()
            .map_or(0, |steps| steps.len());
        let more = num_kept.saturating_add(1).saturating_sub(there) as u64;
        let sidecars = sidecars.iter().map(|(_, content)| content.len());
        let sidecars = sidecars.sum::<usize>() as u64;
        SpaceNeed {
            folder: dir,
            num_bytes: more.saturating_mul((num_values as u64).saturating_mul(4) + sidecars),
            what: "checkpoints",
        }
    }

    /// Starts to save after `step` steps, with what the caller adds; returns when everything is copied, or, where state or weights are away
    /// from the device, written. At a time one save is
    /// under way: [`Self::finish`] comes first. Every rank must call it. An outcome is that of a save that could not even begin.
    ///
    /// # Errors
    /// Failures of ranks and devices.
    pub fn start(
        &mut self,
        optimizer: &DistributedOptimizer,
        step: usize,
        note: impl Into<CheckpointNote>,
    ) -> Result<Option<SaveOutcome>> {
        if let Some(in_flight) = &self.in_flight {
            bail!("the save after step {} is still under way", in_flight.step);
        }
        // What an older checkpoint takes is free again.
        self.wait_for_remover();
        let (params, mesh) = (&optimizer.params, &optimizer.mesh);
        params.check_copies(mesh, "when a checkpoint was to be saved", |index| {
            params.values(index)
        })?;
        params.check_replicas(mesh, "when a checkpoint was to be saved")?;
        let rank = self.world.rank();
        let folder = (rank == 0).then(|| self.stage(step)).transpose();
        // Where rank 0 has made it.
        let made = folder.as_ref().map_err(message_of);
        let made = made.map(|folder| folder.as_ref().map(|folder| folder.path().to_path_buf()));
        let dir = match exchange(&self.world, &made)? {
            Ok(dirs) => dirs.into_iter().next().flatten().unwrap_or_default(),
            Err(message) => {
                return Ok(Some(SaveOutcome {
                    step,
                    saved: Err(message),
                    warning: None,
                }));
            }
        };
        let save_sources = params.save_sources(mesh)?;
        let layout = SavedLayout {
            pp: mesh.degrees.pp,
            dp: mesh.degrees.dp,
            cp: mesh.degrees.cp,
            tp: mesh.degrees.tp,
            zero: params.data_parallel().zero,
            zero_group: params.data_parallel().zero_group,
        };
        let manifest = CheckpointManifest::new(
            params,
            layout,
            optimizer.counters(),
            &save_sources,
            &self.run,
            step,
            note.into(),
        );
        let tensors = RankTensors::new(optimizer, &written_weights(params, &save_sources));
        let files = tensors.and_then(|tensors| self.write(optimizer, dir, &manifest, &tensors));
        self.in_flight = Some(SaveInFlight {
            step,
            staged: folder?.map(|folder| (folder, manifest)),
            // The other ranks learn it at the end.
            files: files.map_err(|err| message_of(&err)),
        });
        Ok(None)
    }

    /// Begins the folder, on rank 0. If somebody has removed the one that it is in, that is made and locked again.
    fn stage(&mut self, step: usize) -> Result<StagedFolder> {
        if !self.is_folder_held() {
            self.lock = None;
            self.lock = Some(Arc::new(self.folder.lock()?));
        }
        self.folder.stage(step)
    }

    /// Begins to write this rank's files into `dir`. What is away is written now, part by part: a copy of all could be more than there is
    /// memory. Of the rest a thread writes copies.
    fn write(
        &self,
        optimizer: &DistributedOptimizer,
        dir: PathBuf,
        manifest: &CheckpointManifest,
        tensors: &RankTensors,
    ) -> Result<JoinHandle<Written>> {
        let rank = self.world.rank();
        let mut file = match tensors.tensors.is_empty() {
            true => None,
            false => Some(RankFileWriter::create(&dir, rank, manifest, tensors)?),
        };
        let mut staged = Vec::new();
        match (&mut file, optimizer.is_away()) {
            (Some(file), true) => {
                tensors.read(optimizer, |tensor, values| file.push(&tensor.name, &values))?;
            }
            _ => staged = tensors.stage(optimizer)?,
        }
        let sidecars = (rank == 0).then(|| self.sidecars.clone());
        let write = move || -> Result<Vec<FileRecord>> {
            let sidecars = sidecars.iter().flat_map(|sidecars| sidecars.iter());
            let written =
                sidecars.map(|(name, content)| FileRecord::write_sidecar(&dir, name, content));
            let mut written: Vec<FileRecord> = written.collect::<Result<_>>()?;
            if let Some(mut file) = file {
                for tensor in staged {
                    file.push(&tensor.name, &tensor.values)?;
                }
                written.push(file.finish()?);
            }
            Ok(written)
        };
        let thread = std::thread::Builder::new().name("checkpoint".into());
        thread
            .spawn(move || write().map_err(|err| message_of(&err)))
            .map_err(|err| Error::msg(format!("cannot start a thread that writes: {err}")))
    }

    /// How the save that is under way ended, if it did. Every rank must call it, between steps.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn poll(&mut self) -> Result<Option<SaveOutcome>> {
        let Some(in_flight) = &self.in_flight else {
            return Ok(None);
        };
        let is_done = in_flight.files.as_ref();
        let is_done = [u8::from(is_done.map_or(true, JoinHandle::is_finished))];
        let all = self.world.all_gather_bytes(&is_done)?;
        match all.iter().all(|is_done| *is_done == [1]) {
            true => self.finish(),
            false => Ok(None),
        }
    }

    /// Waits for the save that is under way, if one is. Every rank must call it.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn finish(&mut self) -> Result<Option<SaveOutcome>> {
        let Some(in_flight) = self.in_flight.take() else {
            return Ok(None);
        };
        let step = in_flight.step;
        let written = exchange(&self.world, &in_flight.files.and_then(wait))?;
        let ended = match (in_flight.staged, written) {
            (None, _) => Ok(None),
            (Some((folder, manifest)), Ok(files)) => {
                let mut files: Vec<FileRecord> = files.into_iter().flatten().collect();
                files.sort_by(|a, b| a.name.cmp(&b.name));
                self.publish(folder, CheckpointManifest { files, ..manifest })
                    .map(Some)
                    .map_err(|err| message_of(&err))
            }
            (Some(_), Err(message)) => Err(message),
        };
        // Rank 0's word.
        type Ended = std::result::Result<Option<(PathBuf, Option<String>)>, String>;
        let ended: Vec<Ended> = gather(&self.world, &ended)?;
        let (saved, warning) = match ended.into_iter().next() {
            Some(Ok(Some((path, warning)))) => (Ok(path), warning),
            Some(Err(message)) => (Err(message), None),
            _ => (Err("rank 0 did not save".to_string()), None),
        };
        Ok(Some(SaveOutcome {
            step,
            saved,
            warning,
        }))
    }

    /// Writes the manifest, and with it the checkpoint exists; then removes old ones.
    fn publish(
        &mut self,
        folder: StagedFolder,
        manifest: CheckpointManifest,
    ) -> Result<(PathBuf, Option<String>)> {
        let step = manifest.step;
        let path = folder.path().join(MANIFEST_FILE);
        let write = |text: String| -> std::io::Result<()> {
            let mut file = File::create_new(&path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write(manifest.to_text()?).map_err(|err| cannot("write", &path, &err))?;
        let path = self.folder.path(step);
        let committed = folder.commit(true);
        committed.map_err(|err| cannot("finish the checkpoint", &path, &err))?;
        let removed = match self.removes_on_request {
            false => self.remove_old(step, None),
            true => Ok(()),
        };
        Ok((path, removed.err().map(|err| message_of(&err))))
    }

    /// Removes the older ones of the checkpoints up to `step`, but for as many as are kept and the newest one of fewer than
    /// `spared_before` steps. Only rank 0 does anything.
    ///
    /// # Errors
    /// One that cannot be removed.
    pub fn remove_old(&mut self, step: usize, spared_before: Option<usize>) -> Result<()> {
        if self.world.rank() != 0 || !self.is_folder_held() {
            return Ok(());
        }
        self.wait_for_remover();
        let hidden = (self.folder).hide_old(&self.run, step, self.keep, spared_before)?;
        let remove = move || {
            // What stays is hidden, and the next run removes it.
            hidden
                .into_iter()
                .for_each(|dir| drop(std::fs::remove_dir_all(dir)));
        };
        let remover = std::thread::Builder::new().name("checkpoint".into());
        self.remover = Some(remover.spawn(remove).map_err(Error::wrap)?);
        Ok(())
    }

    /// Marks the checkpoints after so many steps as those of a run that has failed, so that none of them is the latest or counts among those
    /// that are kept. Every rank must call it, while no save is under way.
    ///
    /// # Errors
    /// The same on every rank: one that cannot be renamed.
    pub fn set_failed_aside(&mut self, steps: RangeInclusive<usize>) -> Result<SetAside> {
        let own = match self.world.rank() {
            0 if self.is_folder_held() => {
                let failed = self.folder.set_failed_aside(&steps, &self.run);
                failed.and_then(|failed| {
                    let newest = self.folder.newest(&self.run)?;
                    Ok(SetAside { failed, newest })
                })
            }
            _ => Ok(SetAside::default()),
        };
        of_first(&self.world, own)?.map_err(Error::msg)
    }

    /// Whether the folder is this run's still, on rank 0: somebody may have removed it, and another run made it again.
    fn is_folder_held(&self) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.is_held())
    }

    fn wait_for_remover(&mut self) {
        if let Some(remover) = self.remover.take() {
            // It has no error to tell.
            let _ = remover.join();
        }
    }
}

impl Drop for CheckpointSaver {
    /// Nothing of this run changes the folder after the lock is gone.
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            let _ = in_flight.files.and_then(wait);
        }
        self.wait_for_remover();
    }
}

/// An error if a folder holds checkpoints of another run, or such as this one has left behind by going on from an older one.
fn check_checkpoints(
    folder: &CheckpointFolder,
    resumed: Option<&TrainingCheckpoint>,
) -> Result<()> {
    for step in folder.steps()? {
        let path = folder.path(step);
        let Ok(manifest) = CheckpointManifest::read(&path) else {
            continue;
        };
        let path = path.display();
        let Some(resumed) = resumed else {
            bail!(
                "{path} is a checkpoint already, and this run would begin anew\nhint: a run that resumes (--resume latest) goes on from the newest one; \
                 one that begins takes another folder (--save-dir)"
            );
        };
        if resumed.run() != manifest.run {
            bail!(
                "{path} is a checkpoint of another run than the one that goes on\nhint: take another folder (--save-dir)"
            );
        }
        if step > resumed.step() && !resumed.is_latest {
            bail!(
                "{path} is newer than the checkpoint after step {} from which the run goes on\nhint: move it away, or choose \
                 another folder",
                resumed.step()
            );
        }
    }
    Ok(())
}
