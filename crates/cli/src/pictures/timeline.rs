//! `candle-train timeline`: a step of a trace as a picture.

mod chart;
mod segments;
mod style;
mod trace_file;

use std::path::{Path, PathBuf};

use candle_core::Result;
use candle_parallel::{Instruction, Plan, Simulation};

use crate::pictures::picture::{Drawing, write_picture};
use candle_train_run::comma_list;
use chart::TimelineChart;
use style::Category;
use trace_file::{Rank, TraceFile, TraceSpan};

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
    /// Draws the picture, and says so.
    ///
    /// # Errors
    /// A file that is no trace, or has not this step; a picture of another kind, or that cannot be written.
    pub fn run(&self) -> Result<()> {
        let trace = TraceFile::read(&self.trace)?;
        let step = trace.step(self.step)?;
        write_picture(&TimelineChart::of_step(&trace, step), &self.output)
    }
}

/// Draws a schedule as steps of traces are drawn.
///
/// # Errors
/// A picture of another kind, or that cannot be written.
pub(crate) fn draw_schedule(
    plan: &Plan,
    simulation: &Simulation,
    name: &str,
    output: &Path,
) -> Result<()> {
    let end = simulation.makespan;
    let ranks = simulation.ranks.iter().enumerate().map(|(rank, timed)| {
        let stages: Vec<usize> = plan.layout().stages_of(rank).collect();
        let idle = TraceSpan {
            start: 0.0,
            end,
            category: Category::Idle,
            unit: None,
        };
        let passes = timed.iter().map(|timed| TraceSpan {
            start: timed.start,
            end: timed.end,
            category: match timed.instruction {
                Instruction::Forward(_) => Category::Forward,
                Instruction::InputGrad(_) => Category::InputGrad,
                Instruction::WeightGrad(_) => Category::WeightGrad,
                _ => Category::Backward,
            },
            unit: Some(timed.instruction.unit()),
        });
        Rank {
            name: match stages[..] {
                [stage] => format!("rank {rank} (stage {stage})"),
                _ => format!("rank {rank} (stages {})", comma_list(&stages)),
            },
            computing: [idle].into_iter().chain(passes).collect(),
            ..Rank::default()
        }
    });
    let ranks: Vec<Rank> = ranks.collect();
    let title = format!("Schedule {name}");
    let source = micro_batches(plan);
    TimelineChart::of_schedule(&ranks, end, title, source).write(output)
}

/// Such as `8 micro-batches`.
pub(crate) fn micro_batches(plan: &Plan) -> String {
    match plan.num_micro_batches() {
        1 => "1 micro-batch".to_string(),
        count => format!("{count} micro-batches"),
    }
}
