//! Metrics file: one JSON object per line, a step or an evaluation after it, flushed at once, so that a run can be watched and survives a crash.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::check_folder_of;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::step_metrics::StepMetrics;
use crate::evaluation::EvalMetrics;

/// A line of a metrics file; an evaluation has `eval_loss` where a step has `loss`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum MetricsLine {
    /// An optimizer step.
    Step(Box<StepMetrics>),
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
        Self::Step(Box::new(metrics.clone()))
    }
}

impl From<&EvalMetrics> for MetricsLine {
    fn from(metrics: &EvalMetrics) -> Self {
        Self::Evaluation(metrics.clone())
    }
}

/// A line of the file as it is written: with the run that writes it.
#[derive(Serialize)]
struct RunLine<'a> {
    #[serde(flatten)]
    metrics: &'a MetricsLine,
    run: &'a str,
}

/// Writer of a JSON-lines file, which is of one run: each of its lines has the name of that as `run`.
///
/// While it lives no other run can write the file.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    run: String,
    /// Bytes that stay, until the first step is written after them.
    kept: Option<u64>,
    next_step: usize,
}

/// What stays of a file.
#[derive(Default)]
struct Kept {
    num_bytes: u64,
    /// After the last one in it.
    next_step: usize,
}

impl Metrics {
    /// Opens `path` for the lines of `run` from its first step on, creating it when it does not exist.
    ///
    /// What the run has written there before keeps its content until the first [`Metrics::log`] replaces it: a run that fails before its
    /// first step loses no earlier numbers. Pipes and devices hold nothing, and are anybody's.
    ///
    /// ```
    /// use candle_trainer::Metrics;
    ///
    /// let dir = tempfile::tempdir()?;
    /// let path = dir.path().join("metrics.jsonl");
    /// std::fs::write(&path, r#"{"step":0,"loss":2.5,"learning_rate":0.1,"run":"monday"}"#.to_string() + "\n")?;
    /// assert_eq!(Metrics::run_of(&path)?.as_deref(), Some("monday"));
    /// // Another run's numbers are not lost by mistake.
    /// assert!(Metrics::create(&path, "tuesday").is_err());
    /// Metrics::replace(&path, "tuesday")?;
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The file is another run's, whether that is over or is writing it, cannot be written, or holds something else than metrics. Call this
    /// before training, so that the error comes before the work.
    pub fn create(path: impl AsRef<Path>, run: &str) -> Result<Self> {
        match Self::run_of(&path)? {
            Some(other) if other.is_empty() => Err(is_of_another(path.as_ref(), &other)),
            _ => Self::resume(path, run, 0),
        }
    }

    /// As [`Metrics::create`], for a run that goes on at `step`: its lines of the steps before it stay, and those of later ones, which
    /// come again, go with the first [`Metrics::log`]. A file without the names of runs, of an earlier version, is taken for its own.
    ///
    /// # Errors
    /// As [`Metrics::create`].
    pub fn resume(path: impl AsRef<Path>, run: &str, step: usize) -> Result<Self> {
        let path = path.as_ref();
        match Self::run_of(path)? {
            Some(other) if !other.is_empty() && other != run => Err(is_of_another(path, &other)),
            Some(_) => Self::open(path, run, lines_before(path, step)?),
            None => Self::open(path, run, Kept::default()),
        }
    }

    /// As [`Metrics::create`], whichever run the file is of: its lines go with the first [`Metrics::log`].
    ///
    /// # Errors
    /// As [`Metrics::create`], but for a file of another run that is over.
    pub fn replace(path: impl AsRef<Path>, run: &str) -> Result<Self> {
        Self::run_of(&path)?;
        Self::open(path.as_ref(), run, Kept::default())
    }

    /// Checks that there can be a file at `path`, where none is; nothing is made.
    ///
    /// # Errors
    /// A folder that is not there or cannot be written to.
    pub fn check_place(path: &Path) -> Result<()> {
        check_folder_of(path).map_err(|err| cannot_write(path, &err))
    }

    /// The run whose metrics `path` has, by its first line; without a name if an earlier version has written it. `None` if nothing is
    /// there, or less than a line.
    ///
    /// # Errors
    /// A file that cannot be read, or holds something else.
    pub fn run_of(path: impl AsRef<Path>) -> Result<Option<String>> {
        let path = path.as_ref();
        if !path.is_file() {
            return Ok(None);
        }
        let line = first_line(path);
        let line = line
            .map_err(|err| Error::msg(format!("cannot read the metrics file {path:?}: {err}")))?;
        // A run that was killed may have left the beginning of one.
        if line.is_empty() || line.starts_with(BEGINNING) && !line.ends_with(b"\n") {
            return Ok(None);
        }
        let line: Option<Map<String, Value>> = serde_json::from_slice(&line).ok();
        // Perhaps of another version, with other fields.
        let has =
            |line: &Map<_, _>, names: &[&str]| names.iter().all(|name| line.contains_key(*name));
        match line {
            Some(line)
                if has(&line, &["step", "loss", "learning_rate"])
                    || has(&line, &["step", "eval_loss"]) =>
            {
                let run = line.get("run").and_then(Value::as_str);
                Ok(Some(run.unwrap_or_default().to_string()))
            }
            _ => bail!(
                "{path:?} is no metrics file of an earlier run, and is not overwritten\nhint: choose another file for the metrics"
            ),
        }
    }

    fn open(path: &Path, run: &str, kept: Kept) -> Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let file = options.open(path).map_err(|err| cannot_write(path, &err))?;
        let is_locked = path.is_file() && matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        if is_locked {
            bail!(
                "another run is writing the metrics file {path:?}\nhint: two runs need two files"
            );
        }
        Ok(Self {
            path: path.to_path_buf(),
            file,
            run: run.to_string(),
            kept: Some(kept.num_bytes),
            next_step: kept.next_step,
        })
    }

    /// The step that follows what was there and stays; `None` of pipes and devices, which hold nothing.
    pub fn next_step(&self) -> Option<usize> {
        self.path.is_file().then_some(self.next_step)
    }

    /// Appends a step or an evaluation.
    ///
    /// # Errors
    /// Writing fails, for example because the disk is full.
    pub fn log(&mut self, metrics: impl Into<MetricsLine>) -> Result<()> {
        let metrics = metrics.into();
        let line = RunLine {
            metrics: &metrics,
            run: &self.run,
        };
        let mut line = serde_json::to_vec(&line).map_err(Error::wrap)?;
        line.push(b'\n');
        match self.write(&line) {
            Ok(()) => Ok(()),
            Err(e) => bail!(
                "cannot write step {} to the metrics file {:?}: {e}",
                metrics.step() + 1,
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

fn is_of_another(path: &Path, run: &str) -> Error {
    let named = match run {
        "" => String::new(),
        name => format!(", {name}"),
    };
    Error::msg(format!(
        "the metrics file {path:?} is of another run{named}, and is not overwritten\nhint: name another file, or give --overwrite too to \
         replace it"
    ))
}

fn cannot_write(path: &Path, err: &std::io::Error) -> Error {
    Error::msg(format!(
        "cannot write the metrics file {path:?}: {err}\nhint: its folder must exist and be writable"
    ))
}

/// The first line of a log, as much of it as may be one.
pub(crate) fn first_line(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    BufReader::new(File::open(path)?.take(1 << 16)).read_until(b'\n', &mut line)?;
    Ok(line)
}

/// With which every line begins.
const BEGINNING: &[u8] = br#"{"step":"#;

/// The lines of a metrics file whose steps are before `step`.
fn lines_before(path: &Path, step: usize) -> Result<Kept> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(err) => bail!("cannot read the metrics file {path:?}: {err}"),
    };
    let mut kept = Kept::default();
    for (index, line) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        match serde_json::from_slice::<MetricsLine>(line) {
            Ok(metrics) if metrics.step() < step && line.ends_with(b"\n") => {
                kept.num_bytes += line.len() as u64;
                kept.next_step = metrics.step() + 1;
            }
            Ok(_) => break,
            // What a run that was killed has not written to its end.
            Err(_) if !line.ends_with(b"\n") => break,
            Err(err) => bail!(
                "line {} of {path:?} is no step of a metrics file: {err}\nhint: --metrics of a run that is resumed names the file \
                 of that run, or a new one",
                index + 1
            ),
        }
    }
    Ok(kept)
}
