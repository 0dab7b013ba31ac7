//! Flags about training checkpoints.

use std::path::{Path, PathBuf, absolute};

use candle_comm::ProcessGroup;
use candle_core::{Result, bail};
use candle_parallel::agree;
use candle_parallel::checkpoint::{
    CheckpointManifest, CheckpointSaver, TrainingCheckpoint, checkpoints_in, set_aside_in,
};
use candle_trainer::TrainingRecord;
use clap::Args;
use jiff::civil::Date;
use serde::Serialize;

use crate::args::data::DATE;
use crate::args::number::whole;
use crate::output::observer::Observers;

/// An error, of the first rank, if a folder without checkpoints has some that were set aside: to begin anew would be another run.
fn refuse_set_aside(dir: &Path, is_first: bool) -> Result<()> {
    let aside = match is_first {
        true => set_aside_in(dir)?,
        false => Vec::new(),
    };
    match aside.last() {
        None => Ok(()),
        Some(path) => bail!(
            "there is no checkpoint in {} to go on from, and some that were set aside, such as {}\nhint: --resume with the name of one goes \
             on from it all the same; for a run that begins choose another --save-dir",
            dir.display(),
            path.display()
        ),
    }
}

/// Saving a run while it goes on, and going on with one.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CheckpointArgs {
    /// Save a checkpoint to resume from after every so many steps, in --save-dir [default: where the run is stopped only]
    ///
    /// Training goes on meanwhile; with --offload optimizer or params it waits until the files are written, for as long as --deadline at most. With --save-dir a checkpoint is also saved where the run is stopped, and after an evaluation with the least
    /// loss so far. The exit code is 88 if not one can be saved, or not the last of a run that is stopped.
    #[arg(long, value_name = "STEPS", value_parser = whole::<usize>(1..))]
    pub save_every: Option<usize>,
    /// Folder of the run's checkpoints: of every --save-every steps, and where the run is stopped [default: none]
    ///
    /// The one after 15 steps is step-000015. On several hosts it is a folder that all of them have.
    #[arg(long, value_name = "DIR")]
    pub save_dir: Option<PathBuf>,
    /// Checkpoints that are kept, the newest ones; with evaluations the one with the least loss, too, and of a run that diverges the last good
    /// one
    #[arg(long, default_value_t = 2, value_name = "CHECKPOINTS", value_parser = whole::<usize>(1..))]
    pub keep: usize,
    /// Go on from a checkpoint, with any layout: its folder, or latest for the newest in --save-dir [default: begin]
    ///
    /// With latest the run begins if there is no checkpoint yet, so that the same command starts a run and goes on with it.
    #[arg(long, value_name = "DIR|latest")]
    pub resume: Option<PathBuf>,
    /// Accept other data and other values of the flags that decide the weights than those of the checkpoint
    #[arg(long)]
    pub resume_anyway: bool,
}

impl CheckpointArgs {
    /// An error if these flags contradict each other, or the trained model would replace the checkpoints in `output`.
    pub(crate) fn validate(&self, output: &Path) -> Result<()> {
        if let (Some(every), None) = (self.save_every, &self.save_dir) {
            bail!(
                "--save-every {every} is given without --save-dir\nhint: --save-dir names the folder of the checkpoints"
            );
        }
        if self.resumes_latest() && self.save_dir.is_none() {
            bail!(
                "--resume latest is given without --save-dir, the folder in which the newest checkpoint is looked for"
            );
        }
        if self.resume_anyway && self.resume.is_none() {
            bail!("--resume-anyway is given without --resume");
        }
        let Some(dir) = &self.save_dir else {
            return Ok(());
        };
        if let (Ok(dir), Ok(output)) = (absolute(dir), absolute(output))
            && (dir.starts_with(&output) || output.starts_with(&dir))
        {
            bail!(
                "--save-dir {} and --output {} are in one another\nhint: checkpoints to resume from and the trained model need two folders",
                dir.display(),
                output.display()
            );
        }
        Ok(())
    }

    /// Checks, for a run that was not started again, what it goes on from, or that it may begin in its folder: for the first rank, before
    /// anything takes long.
    ///
    /// # Errors
    /// What [`Self::open`] and [`Self::saver`] would say of the folders alone.
    pub(crate) fn check_folders(&self) -> Result<()> {
        match (&self.resume, &self.save_dir) {
            (Some(_), Some(dir)) if self.resumes_latest() => match self.noted(false) {
                Some(_) => Ok(()),
                None => refuse_set_aside(dir, true),
            },
            (Some(dir), _) => CheckpointManifest::read(dir).map(drop),
            (None, Some(dir)) => CheckpointSaver::check_folder(dir, None),
            (None, None) => Ok(()),
        }
    }

    fn resumes_latest(&self) -> bool {
        self.resume.as_deref() == Some(Path::new("latest"))
    }

    /// The checkpoint that the run goes on from, if there is one: where a launcher has started the ranks again, the newest of --save-dir,
    /// whatever --resume says; else that of --resume. A run that is not `to_be_done` changes nothing. Every rank must call it.
    pub(crate) fn open(
        &self,
        world: &ProcessGroup,
        is_restart: bool,
        to_be_done: bool,
        observers: &Observers,
    ) -> Result<Option<TrainingCheckpoint>> {
        let is_first = world.rank() == 0;
        let resumes_latest = self.resumes_latest();
        if let Some(dir) = &self.save_dir
            && (is_restart || resumes_latest)
        {
            let (latest, skipped) = match to_be_done {
                true => TrainingCheckpoint::latest(world, dir)?,
                false => TrainingCheckpoint::look(world, dir)?,
            };
            for why in skipped.iter().filter(|_| is_first) {
                observers.warn(format!("a newer checkpoint is skipped: {why}"));
            }
            if latest.is_some() {
                return Ok(latest);
            }
            if resumes_latest {
                agree(world, refuse_set_aside(dir, is_first))?;
            }
        }
        match &self.resume {
            Some(dir) if !resumes_latest => TrainingCheckpoint::open(world, dir).map(Some),
            _ => Ok(None),
        }
    }

    /// Folders in which checkpoints of the run may be: its own, and that of the one which it goes on from.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        let resumed = self.resume.as_deref().filter(|_| !self.resumes_latest());
        let resumed = resumed.and_then(Path::parent);
        self.save_dir.as_deref().into_iter().chain(resumed)
    }

    /// Whether the run goes on from the best weights that an earlier one into `output` has left.
    ///
    /// # Errors
    /// The working directory cannot be read.
    pub fn resumes_from_best(&self, output: &Path) -> Result<bool> {
        let Some(resume) = &self.resume else {
            return Ok(false);
        };
        Ok(absolute(resume)?.starts_with(place_of_best(output)?))
    }

    /// The date of the chat template in the run that this one goes on, if it has one.
    pub fn noted_date(&self, is_restart: bool) -> Option<Date> {
        self.noted_setting(DATE, is_restart)?.parse().ok()
    }

    /// A setting of the run that this one goes on, if it has it.
    pub fn noted_setting(&self, name: &str, is_restart: bool) -> Option<String> {
        let record = self.noted(is_restart)?.record;
        let record: TrainingRecord = serde_json::from_value(record).ok()?;
        record.settings.get(name).cloned()
    }

    /// What is noted of the run that this one goes on, if there is a checkpoint of it. What is wrong with that [`Self::open`] tells.
    pub(crate) fn noted(&self, is_restart: bool) -> Option<CheckpointManifest> {
        let resumes_latest = self.resumes_latest();
        let saved = self
            .save_dir
            .iter()
            .filter(|_| is_restart || resumes_latest);
        let saved = saved.filter_map(|dir| checkpoints_in(dir).ok());
        let named = self.resume.iter().filter(|_| !resumes_latest).cloned();
        let mut manifests = saved.flatten().chain(named);
        manifests.find_map(|dir| CheckpointManifest::read(&dir).ok())
    }

    /// What writes checkpoints, if the run is to, and after how many steps each time: to --save-dir, or to the folder `of_best`, which has the
    /// best and no others. A run that begins is called `run`. Every rank must call it.
    pub(crate) fn saver(
        &self,
        world: &ProcessGroup,
        (run, resumed): (&str, Option<&TrainingCheckpoint>),
        of_best: Option<&Path>,
    ) -> Result<Option<(CheckpointSaver, Option<usize>)>> {
        let (dir, keep, every) = match (&self.save_dir, of_best) {
            (Some(dir), _) => (dir.as_path(), self.keep, self.save_every),
            (None, Some(dir)) => (dir, 1, None),
            (None, None) => return Ok(None),
        };
        let saver = CheckpointSaver::new(world, dir, keep, resumed)?;
        let saver = match resumed {
            Some(_) => saver,
            None => saver.with_run(run),
        };
        Ok(Some((saver, every)))
    }
}

/// `.NAME.best` beside the output folder NAME.
pub(crate) fn place_of_best(output: &Path) -> Result<PathBuf> {
    let output = absolute(output)?;
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    Ok(output.with_file_name(format!(".{name}.best")))
}
