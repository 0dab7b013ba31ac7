//! Metrics file: one JSON object per line and step, flushed at once, so that a run can be watched and survives a crash.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{Result, bail};

use crate::StepMetrics;

/// Writer of a JSON-lines file.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    started: bool,
}

impl Metrics {
    /// Opens `path` for writing, creating it when it does not exist.
    ///
    /// An existing file keeps its content until the first [`Metrics::log`] replaces it: a run that fails before its first
    /// step loses no earlier numbers.
    ///
    /// # Errors
    /// The file cannot be written. Call this before training, so that the error comes before the work.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        match OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
        {
            Ok(file) => Ok(Self {
                path,
                file,
                started: false,
            }),
            Err(e) => bail!(
                "cannot write the metrics file {path:?}: {e}\nhint: its folder must exist and be writable"
            ),
        }
    }

    /// Appends one step.
    ///
    /// # Errors
    /// Writing fails, for example because the disk is full.
    pub fn log(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_vec(metrics).map_err(candle_core::Error::wrap)?;
        line.push(b'\n');
        match self.write(&line) {
            Ok(()) => Ok(()),
            Err(e) => bail!(
                "cannot write step {} to the metrics file {:?}: {e}",
                metrics.step,
                self.path
            ),
        }
    }

    fn write(&mut self, line: &[u8]) -> std::io::Result<()> {
        if !self.started {
            // Pipes and devices such as /dev/stdout cannot be truncated.
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            self.started = true;
        }
        self.file.write_all(line)?;
        self.file.flush()
    }
}
