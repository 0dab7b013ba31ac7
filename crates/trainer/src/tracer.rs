//! A timeline of the ranks in some steps of a run.

mod clock;
mod events;

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_comm::trace::{self, SpanKind};
use candle_comm::{Mesh, P2p, ProcessGroup, message_of};
use candle_core::{Error, Result, Tensor, WithDType, bail};
use candle_data::counted;
use candle_parallel::checkpoint::{WholeFile, check_folder_of};
use candle_parallel::gather;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::logs::metrics_file::first_line;
use clock::Clock;

/// Spans of all ranks together, at most: the file has at most about 300 MB.
const MAX_SPANS: usize = 2_000_000;

/// With which every trace begins.
const BEGINNING: &str = r#"{"otherData":{"candle_train_trace":1"#;

/// Records what all ranks do in some steps of a run, and writes it to one file of
/// [trace events](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which Perfetto and
/// `candle-train timeline` show.
///
/// A process of the trace is a rank: on the track `computing` steps with their passes, optimizer and waits, on the tracks `communication`
/// operations from their call to their end. Times are those of rank 0's clock, to which other processes align theirs by messages.
/// See [`candle_comm::trace`] for what times on a GPU mean.
///
/// The ranks' events come together when the last of the steps is done: a run that is killed before has no trace.
pub struct Tracer {
    path: PathBuf,
    run: String,
    /// The run whose trace is replaced.
    replaced: Option<String>,
    steps: Range<usize>,
    mesh: Mesh,
    /// When the recording began, while it goes on.
    since: Option<Instant>,
}

/// What rank 0 must know of a rank's part.
#[derive(Serialize, Deserialize)]
struct Part {
    num_bytes: usize,
    num_dropped: usize,
    clock_error: i64,
}

impl Tracer {
    /// Checks that a trace can be written to `path`, without changing anything.
    ///
    /// # Errors
    /// A folder that cannot be written to, and a file that is no earlier trace: it is not overwritten.
    pub fn check(path: &Path) -> Result<()> {
        check_folder_of(path).map_err(|err| cannot_write(path, &err))?;
        Self::run_of(path).map(drop)
    }

    /// The run whose trace `path` has; without a name if an earlier version has written it. `None` if nothing is there.
    ///
    /// # Errors
    /// A file that cannot be read, or is no trace.
    pub fn run_of(path: &Path) -> Result<Option<String>> {
        // A pipe or a device holds nothing.
        if !path.is_file() && !path.is_dir() {
            return Ok(None);
        }
        let line = first_line(path).map_err(|err| cannot_write(path, &err))?;
        if line.is_empty() {
            return Ok(None);
        }
        if !line.starts_with(BEGINNING.as_bytes()) {
            bail!(
                "{} is no trace of an earlier run, and is not overwritten\nhint: choose another file for the trace",
                path.display()
            );
        }
        // The line ends within an object.
        let line = String::from_utf8_lossy(&line);
        let about = line.trim_end().trim_end_matches(',');
        let head: Value = serde_json::from_str(&format!("{about}}}")).unwrap_or_default();
        // Earlier versions wrote none.
        let run = head["otherData"]["run"].as_str();
        Ok(Some(run.unwrap_or_default().to_string()))
    }

    /// Records `steps`, counted from 0, of the run of this name, whose next step is `next_step`, on the calling thread. Every rank must make
    /// one, between steps; rank 0 writes the file.
    pub fn new(path: &Path, run: &str, steps: Range<usize>, mesh: &Mesh, next_step: usize) -> Self {
        clock::begin();
        let mut tracer = Self {
            path: path.to_path_buf(),
            run: run.to_string(),
            replaced: Self::run_of(path).unwrap_or_default(),
            steps,
            mesh: mesh.clone(),
            since: None,
        };
        tracer.begin_if_due(next_step);
        tracer
    }

    fn begin_if_due(&mut self, next_step: usize) {
        if self.since.is_none() && self.steps.contains(&next_step) {
            trace::start(MAX_SPANS / self.mesh.world.world_size());
            self.since = Some(Instant::now());
        }
    }

    /// To be called on every rank after each step, with its number. After the last of the steps to record it writes the file; what became of it is told
    /// on rank 0.
    ///
    /// # Errors
    /// Failures of ranks. A file that cannot be written is a warning.
    pub fn after_step(&mut self, step: usize) -> Result<Option<String>> {
        let next_step = step + 1;
        if next_step >= self.steps.end {
            return self.finish();
        }
        self.begin_if_due(next_step);
        Ok(None)
    }

    /// To be called on every rank when training has ended, perhaps earlier than expected: writes the steps so far, unless it was done.
    ///
    /// # Errors
    /// As [`Self::after_step`].
    pub fn finish(&mut self) -> Result<Option<String>> {
        let Some(zero) = self.since.take() else {
            return Ok(None);
        };
        let recording = trace::stop();
        let world = &self.mesh.world;
        let clock = Clock::aligned(world, zero)?;
        let events = events::events(&recording.spans, &self.mesh, &clock)?;
        let part = Part {
            num_bytes: events.len(),
            num_dropped: recording.num_dropped,
            clock_error: clock.error,
        };
        let parts: Vec<Part> = gather(world, &part)?;
        if world.rank() > 0 {
            send(world, 0, events.into_bytes())?;
            return Ok(None);
        }
        let written = self.write(&events, &parts)?;
        let path = self.path.display();
        Ok(Some(match written {
            Err(err) => format!(
                "warning: no trace: cannot write {path}: {}",
                message_of(&err)
            ),
            Ok(()) => {
                let steps = recording.spans.iter();
                let steps = steps.filter(|span| span.kind == SpanKind::Step).count();
                let num_dropped: usize = parts.iter().map(|part| part.num_dropped).sum();
                let missing = match num_dropped {
                    0 => String::new(),
                    _ => format!("; {num_dropped} spans had no room: trace fewer steps"),
                };
                format!(
                    "the trace of {} is in {path}{missing}",
                    counted(steps, "step")
                )
            }
        }))
    }

    /// An error if a file has come since the beginning that is not this run's.
    fn check_unchanged(&self) -> Result<()> {
        match Self::run_of(&self.path)? {
            Some(run) if run != self.run && self.replaced.as_ref() != Some(&run) => {
                bail!("another run, {run}, has written its trace there meanwhile")
            }
            _ => Ok(()),
        }
    }

    /// Writes the file, from what the other ranks send. They are heard to the end, however the writing goes.
    fn write(&self, events: &str, parts: &[Part]) -> Result<Result<()>> {
        let error = parts.iter().map(|part| part.clock_error).max();
        let error = error.unwrap_or(0) as f64 / 1e3;
        let version = env!("CARGO_PKG_VERSION");
        let run = serde_json::to_string(&self.run).map_err(Error::wrap)?;
        let head = format!(
            "{BEGINNING},\"version\":\"{version}\",\"run\":{run},\"num_ranks\":{},\"clock_error_us\":{error}}},\n\"traceEvents\":[\n{events}",
            parts.len()
        );
        let opened = self.check_unchanged();
        let opened = opened.and_then(|()| WholeFile::create(&self.path).map_err(Error::wrap));
        let mut file = opened.and_then(|mut file| {
            file.write_all(head.as_bytes()).map_err(Error::wrap)?;
            Ok(file)
        });
        for (rank, part) in parts.iter().enumerate().skip(1) {
            let events = receive(&self.mesh.world, rank, part.num_bytes)?;
            file = file.and_then(|mut file| {
                file.write_all(b",\n").map_err(Error::wrap)?;
                file.write_all(&events).map_err(Error::wrap)?;
                Ok(file)
            });
        }
        Ok(file.and_then(|mut file| {
            file.write_all(b"\n]}\n").map_err(Error::wrap)?;
            file.commit().map_err(Error::wrap)
        }))
    }
}

fn cannot_write(path: &Path, err: &std::io::Error) -> Error {
    Error::msg(format!(
        "cannot write the trace {}: {err}\nhint: its folder must exist and be writable",
        path.display()
    ))
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if self.since.is_some() {
            trace::stop();
        }
    }
}

fn send<T: WithDType>(world: &ProcessGroup, dst: usize, values: Vec<T>) -> Result<()> {
    let len = values.len();
    let xs = &Tensor::from_vec(values, len, world.device())?;
    world.batch_send_recv(&[P2p::Send { xs, dst }]).map(drop)
}

/// The values that a rank sends, on the host.
fn receive<T: WithDType>(world: &ProcessGroup, src: usize, len: usize) -> Result<Vec<T>> {
    let (shape, dtype) = (len.into(), T::DTYPE);
    let received = world.batch_send_recv(&[P2p::Recv { shape, dtype, src }])?;
    let values = received.first().map(Tensor::to_vec1).transpose()?;
    world.check()?;
    Ok(values.unwrap_or_default())
}
