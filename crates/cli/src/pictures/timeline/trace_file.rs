//! The file of a trace.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Error, Result, bail};
use candle_parallel::Unit;
use serde::Deserialize;

use super::style::Category;

/// What a trace has of its ranks.
pub(super) struct TraceFile {
    /// As it was given.
    pub name: String,
    /// In rank order.
    pub ranks: Vec<Rank>,
}

/// What a rank did.
#[derive(Default)]
pub(super) struct Rank {
    /// Such as `rank 3 (pp 1, dp 0, tp 1)`.
    pub name: String,
    /// Start and end of each step, in milliseconds, which are not the same.
    pub steps: BTreeMap<usize, (f64, f64)>,
    /// All but operations in flight; they lie within each other or apart.
    pub computing: Vec<TraceSpan>,
    /// Start and end of operations in flight.
    pub in_flight: Vec<(f64, f64)>,
}

/// A span of time, in milliseconds.
#[derive(Clone, Debug)]
pub(super) struct TraceSpan {
    pub start: f64,
    pub end: f64,
    pub category: Category,
    /// Of a pass.
    pub unit: Option<Unit>,
}

#[derive(Deserialize)]
struct Content {
    #[serde(rename = "otherData")]
    about: About,
    #[serde(rename = "traceEvents")]
    events: Vec<Record>,
}

#[derive(Deserialize)]
struct About {
    candle_train_trace: u32,
    num_ranks: usize,
}

/// An event as it is written: a span, or a name.
#[derive(Deserialize)]
struct Record {
    ph: String,
    pid: usize,
    name: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: RecordArgs,
}

#[derive(Deserialize, Default)]
struct RecordArgs {
    name: Option<String>,
    step: Option<usize>,
    stage: Option<usize>,
    micro_batch: Option<usize>,
}

impl TraceFile {
    /// Reads a file that `--trace` has written.
    ///
    /// # Errors
    /// A file that cannot be read, or is none.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let text = std::fs::read(path)
            .map_err(|err| Error::msg(format!("cannot read the trace {name}: {err}")))?;
        let no_trace = |why: &dyn std::fmt::Display| {
            Error::msg(format!(
                "{name} is no trace that --trace has written: {why}"
            ))
        };
        let content: Content = serde_json::from_slice(&text).map_err(|err| no_trace(&err))?;
        let About {
            candle_train_trace: version,
            num_ranks,
        } = content.about;
        if version != 1 {
            bail!("{name} is a trace of version {version}; this program knows version 1");
        }
        let mut ranks = BTreeMap::<usize, Rank>::new();
        for record in content.events {
            let Some(rank) = record.pid.checked_sub(1) else {
                return Err(no_trace(&"process 0 is no rank"));
            };
            let rank = ranks.entry(rank).or_default();
            match (record.ph.as_str(), record.name.as_str()) {
                ("M", "process_name") => rank.name = record.args.name.unwrap_or_default(),
                ("X", _) => rank.add(&record).map_err(|why| no_trace(&why))?,
                _ => {}
            }
        }
        if !ranks.keys().copied().eq(0..num_ranks) {
            let found = ranks.len();
            bail!("{name} has events of {found} ranks; expected those of {num_ranks}");
        }
        Ok(Self {
            name,
            ranks: ranks.into_values().collect(),
        })
    }

    /// The step that is asked for, or else of all but the first the one that took the median time.
    ///
    /// # Errors
    /// A step that is not there, and a trace without a step.
    pub fn step(&self, asked: Option<usize>) -> Result<usize> {
        let first = self.ranks.first().map(|rank| &rank.steps);
        let steps = first.into_iter().flatten().map(|(step, _)| *step);
        let is_whole = |step: &usize| self.ranks.iter().all(|rank| rank.steps.contains_key(step));
        let mut steps: Vec<usize> = steps.filter(is_whole).collect();
        if let (Some(asked), Some(first), Some(last)) = (asked, steps.first(), steps.last()) {
            if !steps.contains(&asked) {
                bail!(
                    "{} has no step {asked}; it has steps {first} to {last}",
                    self.name
                );
            }
            return Ok(asked);
        }
        let time = |step: &usize| {
            let (start, end) = self.window(*step);
            end - start
        };
        if steps.len() > 1 {
            // A run's first step checks what later ones need not.
            steps.remove(0);
        }
        steps.sort_by(|a, b| time(a).total_cmp(&time(b)));
        match steps.get(steps.len() / 2) {
            Some(median) => Ok(*median),
            None => bail!("{} has no step that all ranks have done", self.name),
        }
    }

    /// When the first rank begins a step and when the last one ends it.
    pub fn window(&self, step: usize) -> (f64, f64) {
        let spans = self.ranks.iter().filter_map(|rank| rank.steps.get(&step));
        spans.fold((f64::INFINITY, f64::NEG_INFINITY), |all, span| {
            (all.0.min(span.0), all.1.max(span.1))
        })
    }
}

impl Rank {
    fn add(&mut self, record: &Record) -> std::result::Result<(), String> {
        let (start, duration) = (record.ts / 1e3, record.dur / 1e3);
        if !start.is_finite() || !(0.0..f64::INFINITY).contains(&duration) {
            return Err(format!(
                "an event lasts {} µs from {}",
                record.dur, record.ts
            ));
        }
        let end = start + duration;
        if record.cat == "communication" {
            self.in_flight.push((start, end));
            return Ok(());
        }
        let Some(category) = Category::named(&record.cat) else {
            return Err(format!("its category {:?} is unknown", record.cat));
        };
        if let (Category::Step, Some(step), true) = (category, record.args.step, end > start) {
            self.steps.insert(step, (start, end));
        }
        self.computing.push(TraceSpan {
            start,
            end,
            category,
            unit: record.args.micro_batch.map(|micro_batch| Unit {
                // Earlier versions had one stage on each rank, and did not say which.
                stage: record.args.stage.unwrap_or_default(),
                micro_batch,
            }),
        });
        Ok(())
    }
}
