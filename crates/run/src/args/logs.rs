//! Flags about what is written of the steps and evaluations.

use std::ops::ControlFlow;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use candle_comm::message_of;
use candle_core::{Error, Result, bail};
use candle_trainer::{Metrics, MetricsLine, TensorBoard, Tracer, TrainEvent};
use clap::Args;
use serde::Serialize;

use crate::args::trace::TraceArgs;
use crate::output::observer::{Observer, Observers, RunEvent};

/// Where the numbers of the steps go.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LogArgs {
    /// Write one JSON object per step to this file, as candle-train plot draws them [default: none]
    ///
    /// Its fields are step, loss, grad_norm, learning_rate, loss_scale, skipped_steps, padding (the fraction of positions without a token), num_tokens, tokens_per_sec, step_secs, gflops_per_sec (what the model needs for the tokens), mfu (that over what the GPUs can do, where it is known), memory (bytes that rank 0 holds, now and at their peak), global_step (step counts from 0, this from 1, as the lines and the names of checkpoints do), epoch, num_positions (num_tokens are those of them with loss), positions_per_sec, run (which tells runs apart). An evaluation adds an object with step, eval_loss, eval_perplexity, eval_accuracy, eval_num_tokens, eval_secs, global_step, epoch, run. A run that is resumed continues its file; that of another run is refused, or with --overwrite replaced.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Write the same as curves for TensorBoard, to a new event file in this folder; a run that is resumed continues its curves, and the folder
    /// of another run is refused, or with --overwrite its curves are hidden [default: none]
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// The timeline.
    #[command(flatten)]
    #[serde(flatten)]
    pub trace: TraceArgs,
}

/// Whose metrics, curves and trace are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogsOf<'a> {
    pub run: &'a str,
    /// Whether it goes on from a checkpoint.
    pub is_resumed: bool,
    /// Whether those of another run may go.
    pub overwrites: bool,
}

impl LogsOf<'_> {
    /// Whether this is the name of another run. An earlier version wrote no names.
    fn is_other(self, run: &str) -> bool {
        run != self.run && !(self.is_resumed && run.is_empty())
    }

    /// An error if what is at `path` is another run's and stays.
    fn check(self, what: &str, path: &Path, run: Option<&str>) -> Result<()> {
        let Some(other) = run.filter(|run| !self.overwrites && self.is_other(run)) else {
            return Ok(());
        };
        let named = match other {
            "" => String::new(),
            name => format!(", {name}"),
        };
        bail!(
            "the {what} {} is of another run{named}, and is not overwritten\nhint: name another one, or give --overwrite too to replace it",
            path.display()
        )
    }

    /// Opens the file for a run whose next step this is.
    fn open(self, path: &Path, step: usize) -> Result<Metrics> {
        let is_other = |other: String| self.is_other(&other);
        match self.overwrites && Metrics::run_of(path)?.is_some_and(is_other) {
            true => Metrics::replace(path, self.run),
            false if self.is_resumed => Metrics::resume(path, self.run, step),
            false => Metrics::create(path, self.run),
        }
    }
}

type WriteLine = Box<dyn FnMut(&MetricsLine) -> Result<()> + Send>;

/// What the steps and evaluations are written to.
pub(crate) struct Log {
    name: &'static str,
    write: WriteLine,
}

impl Observer for Log {
    fn observe(&mut self, event: &RunEvent) -> Result<ControlFlow<()>> {
        let line: MetricsLine = match event {
            RunEvent::Train(TrainEvent::Step(step)) => (*step).into(),
            RunEvent::Train(TrainEvent::Evaluation(evaluation)) => (*evaluation).into(),
            _ => return Ok(ControlFlow::Continue(())),
        };
        let written = (self.write)(&line);
        written
            .map_err(|err| Error::msg(format!("no more {}: {}", self.name, message_of(&err))))?;
        Ok(ControlFlow::Continue(()))
    }
}

impl LogArgs {
    /// An error if something is to be written into the folder `output`, where the trained model will be.
    pub(crate) fn check_places(&self, output: &Path) -> Result<()> {
        for (what, path) in [
            ("metrics file", &self.metrics),
            ("TensorBoard folder", &self.tensorboard),
            ("trace", &self.trace.trace),
        ] {
            let Some(path) = path else { continue };
            let dir = path.parent().and_then(|dir| dir.canonicalize().ok());
            let absolute = std::path::absolute(path).ok();
            let mut places = dir.iter().chain(&absolute);
            if places.any(|path| path.starts_with(output)) {
                bail!(
                    "the {what} {} is in the output folder {}, which the trained model replaces as a whole\nhint: put it beside \
                     the folder",
                    path.display(),
                    output.display()
                );
            }
        }
        Ok(())
    }

    /// Checks what can be checked without changing anything, for a run that goes on at `step`, if it does; `output` is where the trained
    /// model will be, without links.
    pub(crate) fn check(
        &self,
        output: &Path,
        (step, num_steps): (Option<usize>, usize),
        of: LogsOf,
    ) -> Result<()> {
        self.check_places(output)?;
        if let Some(dir) = &self.tensorboard {
            if dir.exists() && !dir.is_dir() {
                bail!("--tensorboard {} is no folder", dir.display());
            }
            TensorBoard::check(dir)?;
        }
        self.trace.check(num_steps)?;
        self.check_runs(of)?;
        // A pipe is opened once, to be written to: who reads it leaves when it is closed.
        let is_pipe = |path: &&PathBuf| {
            let metadata = std::fs::metadata(path);
            metadata.is_ok_and(|metadata| metadata.file_type().is_fifo())
        };
        let mut files = self.metrics.iter().filter(|path| !is_pipe(path));
        files.try_for_each(|path| match path.exists() {
            true => of.open(path, step.unwrap_or(0)).map(drop),
            false => Metrics::check_place(path),
        })
    }

    /// An error if curves or a trace are there that are another run's.
    fn check_runs(&self, of: LogsOf) -> Result<()> {
        let [_, curves, trace] = self.runs()?;
        if let Some(dir) = &self.tensorboard {
            of.check("TensorBoard folder", dir, curves.as_deref())?;
        }
        let mut path = self.trace.trace.iter();
        path.try_for_each(|path| of.check("trace", path, trace.as_deref()))
    }

    /// The runs whose metrics, curves and trace are there.
    pub(crate) fn runs(&self) -> Result<[Option<String>; 3]> {
        let trace = self.trace.trace.as_deref();
        Ok([
            (self.metrics.as_ref()).map_or(Ok(None), Metrics::run_of)?,
            (self.tensorboard.as_ref()).map_or(Ok(None), TensorBoard::run_of)?,
            trace.map_or(Ok(None), Tracer::run_of)?,
        ])
    }

    /// Opens them for a run that begins, or goes on at a step.
    pub(crate) fn open(
        &self,
        resumed_at: Option<usize>,
        of: LogsOf,
        observers: &Observers,
    ) -> Result<Vec<Log>> {
        let mut logs = Vec::new();
        self.check_runs(of)?;
        if let Some(path) = &self.metrics {
            let mut metrics = of.open(path, resumed_at.unwrap_or(0))?;
            if let (Some(next), Some(step)) = (metrics.next_step(), resumed_at)
                && next < step
            {
                observers.warn(format!(
                    "the metrics file {} ends after step {next} of the {step} that are done: it lacks the others",
                    path.display()
                ));
            }
            logs.push(Log {
                name: "metrics",
                write: Box::new(move |line| metrics.log(line.clone())),
            });
        }
        if let Some(dir) = &self.tensorboard {
            let mut events = TensorBoard::create(dir, of.run, resumed_at.unwrap_or(0))?;
            logs.push(Log {
                name: "curves",
                write: Box::new(move |line| events.log(line)),
            });
        }
        Ok(logs)
    }
}
