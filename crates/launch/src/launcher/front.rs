//! The front: the process that the user started. It starts an agent per host, shows what the ranks write, and decides
//! when the run is over and what it died of.

mod agent_link;
mod labelled_output;
mod rank_outputs;
mod run;
mod verdict;

use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::Signal;

use super::config::LaunchConfig;
use super::dry_run::DryRun;
use super::end::End;
use super::layout::Layout;
use super::wire::Report;
use super::{process_tree, program, signals};
use crate::{Error, Result};
use agent_link::AgentLink;
use rank_outputs::RankOutputs;
use run::Run;

/// The exit code where nothing was started.
const NOT_STARTED_EXIT_CODE: u8 = 2;

/// What the front's main thread hears.
enum Event {
    Signal(Signal),
    Report(usize, Report),
    Ended(RankEnd),
    /// An agent is gone, for this reason or because all is over there.
    Gone {
        host: usize,
        detail: String,
        last_lines: Vec<String>,
    },
}

/// The end of a rank.
#[derive(Debug)]
struct RankEnd {
    host: usize,
    rank: usize,
    pid: i32,
    end: End,
    ended_at: Instant,
    /// What it last wrote to stderr.
    last_lines: Vec<String>,
}

/// Runs `candle-train launch`; the last thing it prints is why the run failed, if it did.
pub fn launch(config: &LaunchConfig) -> ExitCode {
    let (code, sentence) = match try_launch(config) {
        Ok((code, sentence)) => (code, sentence),
        Err(error) => (NOT_STARTED_EXIT_CODE, Some(error.to_string())),
    };
    if let Some(sentence) = sentence {
        let _ = writeln!(stderr(), "candle-train: {sentence}");
    }
    ExitCode::from(code)
}

/// The exit code, and what to print last.
fn try_launch(config: &LaunchConfig) -> Result<(u8, Option<String>)> {
    let layout = Layout::new(config)?;
    if layout.hosts.iter().any(|host| host.via.is_none()) {
        let search_path = std::env::var("PATH").unwrap_or_default();
        let plan = &layout.hosts[0].plan;
        program::find(&plan.program, Path::new(&plan.folder), &search_path)?;
    }
    if config.dry_run {
        let _ = write!(stdout(), "{}", DryRun(&layout));
        return Ok((0, None));
    }
    let outputs = open_outputs(&layout, config.log_dir.as_deref())?;
    // Before any thread is started: they all inherit it.
    let signals = signals::block()?;
    // What an agent that is killed leaves behind becomes ours.
    set_child_subreaper(true)
        .map_err(|errno| Error::Launch(format!("cannot become a subreaper: {errno}")))?;
    let (sender, events) = mpsc::channel();
    let mut agents = Vec::new();
    for (index, (host, outputs)) in layout.hosts.iter().zip(outputs).enumerate() {
        agents.push(AgentLink::start(index, host, outputs, &sender)?);
    }
    signals::watch(signals, move |signal| {
        let _ = sender.send(Event::Signal(signal));
    });
    let grace = Duration::from_secs_f64(config.grace_secs);
    let outcome = Run::new(&layout, agents, grace).drive(&events);
    let survivors = process_tree::kill_descendants();
    if !survivors.is_empty() {
        run::warn_survivors(
            "this host",
            &survivors.iter().map(|pid| pid.as_raw()).collect::<Vec<_>>(),
        );
    }
    Ok(outcome)
}

fn open_outputs(layout: &Layout, log_dir: Option<&Path>) -> Result<Vec<RankOutputs>> {
    if let Some(dir) = log_dir {
        std::fs::create_dir_all(dir).map_err(|error| {
            Error::Launch(format!(
                "cannot create log folder {}: {error}",
                dir.display()
            ))
        })?;
    }
    let outputs = layout.hosts.iter();
    outputs
        .map(|host| RankOutputs::open(&host.plan, log_dir))
        .collect()
}
