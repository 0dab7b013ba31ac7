//! Flags about the timeline of a run.

use std::ops::Range;
use std::path::PathBuf;

use candle_comm::Mesh;
use candle_core::{Result, bail};
use candle_trainer::Tracer;
use clap::Args;
use serde::{Serialize, Serializer};

use crate::args::text::some_text;
use crate::output::observer::Observers;

/// Steps that are recorded unless the flags say otherwise.
const NUM_STEPS: usize = 10;

/// What is recorded of which steps.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TraceArgs {
    /// Record what every rank does when (forward and backward pass, communication, optimizer, waiting) and write it to this file, which
    /// Perfetto (https://ui.perfetto.dev) opens and `candle-train timeline` draws; the trace of another run is refused, or with --overwrite
    /// replaced [default: none]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Steps that --trace records, counted from 0 as in --metrics, the last one not among them; the file is written after them [default: the first
    /// 10 of the run]
    #[arg(long, value_name = "FIRST..END", value_parser = steps, requires = "trace")]
    #[serde(serialize_with = "range")]
    pub trace_steps: Option<Range<usize>>,
}

impl TraceArgs {
    /// An error if a run of so many steps has none to be recorded.
    pub(crate) fn check_steps(&self, num_steps: usize) -> Result<()> {
        if let Some(steps) = &self.trace_steps
            && steps.start >= num_steps
        {
            bail!(
                "--trace-steps {}..{} begins after the last of the run's {num_steps} steps\nhint: they are counted from 0",
                steps.start,
                steps.end
            );
        }
        Ok(())
    }

    /// Checks, without changing anything, that a run of so many steps can be recorded.
    pub(crate) fn check(&self, num_steps: usize) -> Result<()> {
        self.check_steps(num_steps)?;
        self.trace.iter().try_for_each(|path| Tracer::check(path))
    }

    /// What records the run of this name, whose next step is `next_step`.
    pub(crate) fn tracer(
        &self,
        mesh: &Mesh,
        run: &str,
        next_step: usize,
        observers: &Observers,
    ) -> Option<Tracer> {
        let steps = self.trace_steps.clone().unwrap_or(0..NUM_STEPS);
        let path = self.trace.as_ref()?;
        if steps.end <= next_step {
            if mesh.world.rank() == 0 {
                observers.warn(format!(
                    "there will be no trace: the run goes on with step {next_step}, after the steps {}..{} that are recorded\n\
                     hint: --trace-steps names others",
                    steps.start, steps.end
                ));
            }
            return None;
        }
        Some(Tracer::new(path, run, steps, mesh, next_step))
    }
}

/// As the flag has it.
fn range<S: Serializer>(
    steps: &Option<Range<usize>>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let steps = steps.as_ref();
    some_text(&steps.map(|steps| format!("{steps:?}")), serializer)
}

fn steps(text: &str) -> std::result::Result<Range<usize>, String> {
    let steps = text.split_once("..");
    let steps = steps.and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
    steps
        .filter(|steps| !steps.is_empty())
        .ok_or_else(|| "expected two numbers such as 10..20, the first one less".to_string())
}
