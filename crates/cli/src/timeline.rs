//! `candle-train timeline`: a step of a trace as a picture.

mod chart;
mod segments;
mod style;
mod trace_file;

use std::path::PathBuf;

use candle_core::Result;

use crate::picture::Drawing;
use chart::Chart;
use trace_file::TraceFile;

/// Draw what every rank did in a step, and for which share of its time
#[derive(Debug, clap::Args)]
pub(crate) struct TimelineArgs {
    /// File of --trace
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// The picture, which ends with .png or .svg
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Which step, counted from 0 [default: of all but the first the one that took the median time]
    #[arg(long, value_name = "STEP")]
    step: Option<usize>,
}

impl TimelineArgs {
    /// Draws the picture.
    ///
    /// # Errors
    /// A file that is no trace, or has not this step; a picture of another kind, or that cannot be written.
    pub fn run(&self) -> Result<()> {
        let trace = TraceFile::read(&self.trace)?;
        let step = trace.step(self.step)?;
        Chart::new(&trace, step).write(&self.output)
    }
}
