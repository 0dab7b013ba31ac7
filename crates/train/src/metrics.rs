//! Metrics file: one JSON object per line, a step or an evaluation after it, flushed at once, so that a run can be watched and survives a crash.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{Result, bail};

use serde::{Deserialize, Serialize};

use crate::{EvalMetrics, StepMetrics};

/// A line of a metrics file; an evaluation has `eval_loss` where a step has `loss`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MetricsLine {
    /// An optimizer step.
    Step(StepMetrics),
    /// An evaluation after a step.
    Evaluation(EvalMetrics),
}

impl MetricsLine {
    /// The step, counted from 0.
    pub fn step(&self) -> usize {
        match self {
            Self::Step(metrics) => metrics.step,
            Self::Evaluation(metrics) => metrics.step,
        }
    }
}

impl From<&StepMetrics> for MetricsLine {
    fn from(metrics: &StepMetrics) -> Self {
        Self::Step(metrics.clone())
    }
}

impl From<&EvalMetrics> for MetricsLine {
    fn from(metrics: &EvalMetrics) -> Self {
        Self::Evaluation(metrics.clone())
    }
}

/// Writer of a JSON-lines file.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    /// Bytes that stay, until the first step is written after them.
    kept: Option<u64>,
}

impl Metrics {
    /// Opens `path` for writing, creating it when it does not exist.
    ///
    /// An existing file keeps its content until the first [`Metrics::log`] replaces it: a run that fails before its first
    /// step loses no earlier numbers. While the result lives no other run can write the file.
    ///
    /// # Errors
    /// The file cannot be written, holds something else than metrics, or is another run's. Call this before training, so that the error
    /// comes before the work.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let fail = |err: std::io::Error| {
            candle_core::Error::msg(format!(
                "cannot write the metrics file {path:?}: {err}\nhint: its folder must exist and be writable"
            ))
        };
        // Pipes and devices such as /dev/stdout hold nothing, and are anybody's.
        if path.is_file() && !begins_with_metrics(&path).map_err(fail)? {
            bail!(
                "{path:?} is no metrics file of an earlier run, and is not overwritten\nhint: choose another file for the metrics"
            );
        }
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(fail)?;
        let is_locked = path.is_file() && matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        if is_locked {
            bail!(
                "another run is writing the metrics file {path:?}\nhint: two runs need two files"
            );
        }
        Ok(Self {
            path,
            file,
            kept: Some(0),
        })
    }

    /// As [`Metrics::create`], for a run that goes on at `step`: the lines of the steps before it stay, and those of later ones, which
    /// come again, go with the first [`Metrics::log`].
    ///
    /// # Errors
    /// As [`Metrics::create`]; a file that holds something else.
    pub fn resume(path: impl AsRef<Path>, step: usize) -> Result<Self> {
        let path = path.as_ref();
        let kept = match std::fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => 0,
            Err(err) if err.kind() == ErrorKind::NotFound => 0,
            _ => bytes_before(path, step)?,
        };
        Ok(Self {
            kept: Some(kept),
            ..Self::create(path)?
        })
    }

    /// Appends a step or an evaluation.
    ///
    /// # Errors
    /// Writing fails, for example because the disk is full.
    pub fn log(&mut self, metrics: impl Into<MetricsLine>) -> Result<()> {
        let metrics = metrics.into();
        let mut line = serde_json::to_vec(&metrics).map_err(candle_core::Error::wrap)?;
        line.push(b'\n');
        match self.write(&line) {
            Ok(()) => Ok(()),
            Err(e) => bail!(
                "cannot write step {} to the metrics file {:?}: {e}",
                metrics.step(),
                self.path
            ),
        }
    }

    fn write(&mut self, line: &[u8]) -> std::io::Result<()> {
        if let Some(kept) = self.kept {
            // Pipes and devices such as /dev/stdout cannot be truncated.
            if self.file.metadata()?.is_file() {
                self.file.set_len(kept)?;
                self.file.seek(SeekFrom::Start(kept))?;
            }
            self.kept = None;
        }
        self.file.write_all(line)?;
        self.file.flush()
    }
}

/// Whether a file is empty or its first line is a step's, perhaps of another version, or the beginning of one, which a run that was killed
/// has left.
fn begins_with_metrics(path: &Path) -> std::io::Result<bool> {
    let mut line = Vec::new();
    BufReader::new(File::open(path)?.take(1 << 16)).read_until(b'\n', &mut line)?;
    let fields: Option<serde_json::Map<String, serde_json::Value>> =
        serde_json::from_slice(&line).ok();
    let is_step = |fields: serde_json::Map<_, _>| {
        ["step", "loss", "learning_rate"]
            .iter()
            .all(|name| fields.contains_key(*name))
    };
    let is_cut = line.starts_with(BEGINNING) && !line.ends_with(b"\n");
    Ok(line.is_empty() || is_cut || fields.is_some_and(is_step))
}

/// With which every line begins.
const BEGINNING: &[u8] = br#"{"step":"#;

/// Bytes of the lines of a metrics file whose steps are before `step`.
fn bytes_before(path: &Path, step: usize) -> Result<u64> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(err) => bail!("cannot read the metrics file {path:?}: {err}"),
    };
    let mut kept = 0;
    for (index, line) in text.split_inclusive('\n').enumerate() {
        match serde_json::from_str::<MetricsLine>(line) {
            Ok(metrics) if metrics.step() < step && line.ends_with('\n') => {
                kept += line.len() as u64
            }
            Ok(_) => break,
            // What a run that was killed has not written to its end.
            Err(_) if !line.ends_with('\n') => break,
            Err(err) => bail!(
                "line {} of {path:?} is no step of a metrics file: {err}\nhint: --metrics of a run that is resumed names the file \
                 of that run, or a new one",
                index + 1
            ),
        }
    }
    Ok(kept)
}
