//! A note in a model folder: which run has made it, and what it has made.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Result, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::model_folder::ModelFolder;
use crate::files::read_file;

/// Name of the note.
pub(super) const RUN_FILE: &str = ".candle_train.json";

/// What it says.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RunFile {
    run: String,
    /// Steps that were done, of a run that was stopped before its end.
    pub steps: Option<usize>,
    /// Size of each file, and when it was last modified, in seconds and nanoseconds.
    files: BTreeMap<String, (u64, i64, i64)>,
}

impl RunFile {
    /// Of the folder as it is.
    pub fn of(dir: &Path, run: &str, steps: Option<usize>) -> Result<Self> {
        let folder = ModelFolder::read(dir)?;
        let names = [folder.weights, folder.sidecars, folder.foreign].concat();
        let file = |name: String| {
            let metadata = dir.join(&name).metadata()?;
            let modified = (metadata.mtime(), metadata.mtime_nsec());
            Ok((name, (metadata.len(), modified.0, modified.1)))
        };
        Ok(Self {
            run: run.to_string(),
            steps,
            files: names.into_iter().map(file).collect::<Result<_>>()?,
        })
    }

    /// Notes what is in the folder.
    pub fn write(dir: &Path, run: &str, steps: Option<usize>) -> Result<()> {
        let text = serde_json::to_vec_pretty(&Self::of(dir, run, steps)?)?;
        File::create_new(dir.join(RUN_FILE))?.write_all(&text)
    }

    /// The note of a folder, if there is one.
    pub fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&read_file(&dir.join(RUN_FILE)).ok()?).ok()
    }
}
