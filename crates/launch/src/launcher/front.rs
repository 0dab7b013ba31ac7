//! The front: the process that the user started. It starts an agent per host, shows what the ranks write, and decides
//! when the run is over and what it died of.

mod agent_link;
mod door;
mod labelled_output;
mod leading;
mod mpi_job;
mod outcome;
mod rank_outputs;
mod restarts;
mod room;
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
use nix::unistd::Pid;

use super::config::LaunchConfig;
use super::dry_run::DryRun;
use super::end::End;
use super::layout::Layout;
use super::wire::Report;
use super::{member, mpi, process_tree, program, shares, signals};
use crate::{Error, Result};
use agent_link::AgentLink;
use door::Door;
use leading::Place;
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
    /// What MPI has started the agents with has ended: its process, and how.
    MpiEnded(Pid, String),
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
    let known = shares::of(config)?;
    let place = match config.is_led() {
        true => Some(leading::place_of(config)?),
        false => None,
    };
    let num_ranks = known.iter().map(|host| host.num_ranks).sum();
    let through_mpi = mpi::is_asked(config, num_ranks);
    let first = shares::numbered(known.iter().cloned());
    let layout = Layout::new(config, first, 0, through_mpi)?;
    if layout.hosts.iter().any(|host| host.via.is_none()) {
        let search_path = std::env::var("PATH").unwrap_or_default();
        let plan = &layout.hosts[0].plan;
        program::find(&plan.program, Path::new(&plan.folder), &search_path)?;
    }
    if config.dry_run {
        let _ = write!(stdout(), "{}", DryRun(&layout));
        return Ok((0, None));
    }
    if let Some(Place::Member { front, secret }) = &place {
        return member::serve(config, front, secret);
    }
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
    let door = match place {
        Some(Place::Leader(listener, address, secret)) => Some(Door::at(
            listener,
            address,
            (secret, true),
            &config.program,
            &sender,
        )),
        _ => None,
    };
    let room = door.as_ref().map(|door| door.room.clone());
    let restarts = Restarts::new(config, known, room)?;
    Front {
        config,
        sender,
        events,
        door,
        through_mpi,
        restarts,
    }
    .run()
}

/// The launcher that starts ranks.
struct Front<'a> {
    config: &'a LaunchConfig,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// Where agents and hosts call, if any are to.
    door: Option<Door>,
    through_mpi: bool,
    restarts: Restarts,
}

impl Front<'_> {
    /// Starts ranks until there is nothing more to start.
    fn run(mut self) -> Result<(u8, Option<String>)> {
        let ended = self.run_all();
        let words = match &ended {
            Ok((code, sentence)) => (*code, sentence.clone().unwrap_or_default()),
            Err(error) => (NOT_STARTED_EXIT_CODE, error.to_string()),
        };
        if let Some(door) = self.door.filter(|door| door.is_given) {
            let others = self.restarts.hosts().into_iter();
            let others = others.filter(|host| !host.is_here).map(|host| host.name);
            let first = words.1.lines().next().unwrap_or_default();
            door.room.close((words.0, first), others.collect());
        }
        ended
    }

    fn run_all(&mut self) -> Result<(u8, Option<String>)> {
        loop {
            if let Some(end) = self.restarts.gather(&self.events) {
                return Ok(end);
            }
            let outcome = self.run_once()?;
            match self.restarts.after(outcome) {
                Next::End(outcome) => {
                    return Ok(last_words(outcome, self.restarts.num_restarts()));
                }
                Next::ChangeHosts => {}
                Next::ThroughMpi => self.through_mpi = true,
                Next::Start(why, at) => {
                    say(&why);
                    if let Some(signal) = at.and_then(|at| wait(&self.events, at)) {
                        return Ok(stopped_by(signal));
                    }
                }
            }
        }
    }

    /// Starts the ranks and waits until nothing is left of them.
    fn run_once(&mut self) -> Result<Outcome> {
        let (hosts, num_restarts) = (self.restarts.hosts(), self.restarts.num_restarts());
        let layout = Layout::new(self.config, hosts, num_restarts, self.through_mpi)?;
        let outputs = open_outputs(&layout, self.config.log_dir.as_deref())?;
        let job = match &layout.mpi {
            Some(mpi) => {
                let opened = match self.door.take() {
                    Some(door) => door,
                    None => Door::open(mpi.other_host.as_deref(), &self.sender)?,
                };
                let door = self.door.insert(opened);
                Some(MpiJob::start(mpi, door, &self.sender)?)
            }
            None => None,
        };
        let calls = match &job {
            Some(job) => job.gather(layout.hosts.len(), &self.events),
            None => Ok(Vec::new()),
        };
        let mut outcome = match calls {
            Ok(calls) => {
                let agents = self.links(&layout, outputs, calls)?;
                let mut away = None;
                let change = || self.restarts.change(&mut away);
                let mpi = job.as_ref().map(|job| job.pid);
                Run::new(&layout, agents, mpi).drive(&self.events, change)
            }
            Err(outcome) => outcome,
        };
        if let Some(job) = job {
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

    /// The links to all agents: those that have called, or new ones.
    fn links(
        &self,
        layout: &Layout,
        outputs: Vec<RankOutputs>,
        calls: Vec<TcpStream>,
    ) -> Result<Vec<AgentLink>> {
        let mut calls = calls.into_iter();
        let hosts = layout.hosts.iter().zip(outputs).enumerate();
        let links = hosts.map(|(index, (host, outputs))| match calls.next() {
            Some(call) => AgentLink::called((index, call), host, outputs, &self.sender),
            None => AgentLink::start(index, host, outputs, &self.sender),
        });
        links.collect()
    }
}

fn stopped_by(signal: Signal) -> (u8, Option<String>) {
    (
        128 + signal as u8,
        Some(describe_signal(signal as i32, &[])),
    )
}

/// The exit code, and what to print last.
fn last_words(outcome: Outcome, num_restarts: usize) -> (u8, Option<String>) {
    if let (0, number @ 1..) = (outcome.exit_code, num_restarts) {
        say(&format!("the run is complete, after {number} restarts"));
    }
    (outcome.exit_code, outcome.sentence)
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
