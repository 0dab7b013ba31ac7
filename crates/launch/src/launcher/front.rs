//! The front: the process that the user started. It starts an agent per host, shows what the ranks write, and decides
//! when the run is over and what it died of.

mod agent_link;
mod door;
mod labelled_output;
mod mpi_job;
mod outcome;
mod rank_outputs;
mod restarts;
mod run;
mod verdict;

use std::io::{Write, stderr, stdout};
use std::net::TcpStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::Signal;

use super::config::LaunchConfig;
use super::dry_run::DryRun;
use super::end::End;
use super::layout::Layout;
use super::wire::Report;
use super::{mpi, process_tree, program, shares, signals};
use crate::{Error, Result};
use agent_link::AgentLink;
use door::Door;
use mpi_job::MpiJob;
use outcome::{Outcome, Remedy};
use rank_outputs::RankOutputs;
use restarts::{Next, Restarts};
use run::Run;
use verdict::describe_signal;

/// The exit code where nothing was started.
const NOT_STARTED_EXIT_CODE: u8 = 2;

/// What the front's main thread hears.
enum Event {
    Signal(Signal),
    Report(usize, Report),
    Ended(RankEnd),
    /// The agent of a rank that MPI has started.
    Called {
        rank: usize,
        stream: TcpStream,
    },
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
        say(&sentence);
    }
    ExitCode::from(code)
}

/// The exit code, and what to print last.
fn try_launch(config: &LaunchConfig) -> Result<(u8, Option<String>)> {
    let mut restarts = Restarts::new(config, shares::of(config)?)?;
    let hosts = restarts.hosts();
    let num_ranks = hosts.iter().map(|host| host.num_ranks).sum();
    let mut through_mpi = mpi::is_asked(config, num_ranks);
    let mut layout = Layout::new(config, hosts, 0, through_mpi)?;
    if layout.hosts.iter().any(|host| host.via.is_none()) {
        let search_path = std::env::var("PATH").unwrap_or_default();
        let plan = &layout.hosts[0].plan;
        program::find(&plan.program, Path::new(&plan.folder), &search_path)?;
    }
    if config.dry_run {
        let _ = write!(stdout(), "{}", DryRun(&layout));
        return Ok((0, None));
    }
    let mut outputs = open_outputs(&layout, config.log_dir.as_deref())?;
    // Before any thread is started: they all inherit it.
    let signals = signals::block()?;
    // What an agent that is killed leaves behind becomes ours.
    set_child_subreaper(true)
        .map_err(|errno| Error::Launch(format!("cannot become a subreaper: {errno}")))?;
    let (sender, events) = mpsc::channel();
    let on_signal = sender.clone();
    signals::watch(signals, move |signal| {
        let _ = on_signal.send(Event::Signal(signal));
    });
    loop {
        let outcome = run_once(&layout, outputs, &sender, &events)?;
        match restarts.after(outcome) {
            Next::End(outcome) => return Ok(last_words(outcome, restarts.num_restarts())),
            Next::ThroughMpi => through_mpi = true,
            Next::Start(why, at) => {
                say(&why);
                if let Some(signal) = at.and_then(|at| wait(&events, at)) {
                    let sentence = describe_signal(signal as i32, &[]);
                    return Ok((128 + signal as u8, Some(sentence)));
                }
            }
        }
        let num_restarts = restarts.num_restarts();
        layout = Layout::new(config, restarts.hosts(), num_restarts, through_mpi)?;
        outputs = open_outputs(&layout, config.log_dir.as_deref())?;
    }
}

/// The exit code, and what to print last.
fn last_words(outcome: Outcome, num_restarts: usize) -> (u8, Option<String>) {
    {
        if let (0, number @ 1..) = (outcome.exit_code, num_restarts) {
            say(&format!("the run is complete, after {number} restarts"));
        }
    }
    (outcome.exit_code, outcome.sentence)
}

/// Starts the ranks and waits until nothing is left of them.
fn run_once(
    layout: &Layout,
    outputs: Vec<RankOutputs>,
    sender: &Sender<Event>,
    events: &Receiver<Event>,
) -> Result<Outcome> {
    let mut mpi_job = match &layout.mpi {
        Some(mpi) => {
            let door = Door::open(mpi.other_host.as_deref(), sender)?;
            Some(MpiJob::start(mpi, &door)?)
        }
        None => None,
    };
    let gathered = match &mut mpi_job {
        Some(job) => job.gather(layout.hosts.len(), events).map(Some),
        None => Ok(None),
    };
    let mut outcome = match gathered {
        Ok(calls) => {
            let mut calls = calls.into_iter().flatten();
            let mut agents = Vec::new();
            for (index, (host, outputs)) in layout.hosts.iter().zip(outputs).enumerate() {
                agents.push(match calls.next() {
                    Some(call) => AgentLink::called((index, call), host, outputs, sender)?,
                    None => AgentLink::start(index, host, outputs, sender)?,
                });
            }
            Run::new(layout, agents).drive(events)
        }
        Err(outcome) => outcome,
    };
    if let Some(job) = mpi_job {
        job.end();
    }
    let survivors = process_tree::kill_descendants();
    if !survivors.is_empty() {
        let pids: Vec<_> = survivors.iter().map(|pid| pid.as_raw()).collect();
        run::warn_survivors("this host", &pids);
        outcome.remedy = Remedy::None(run::SURVIVORS.to_string());
    }
    Ok(outcome)
}

/// Until then, or until a signal.
fn wait(events: &Receiver<Event>, until: Instant) -> Option<Signal> {
    loop {
        let rest = until.saturating_duration_since(Instant::now());
        match events.recv_timeout(rest) {
            Ok(Event::Signal(signal)) => return Some(signal),
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

fn say(sentence: &str) {
    let _ = writeln!(stderr(), "candle-train: {sentence}");
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
