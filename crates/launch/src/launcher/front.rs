//! The front: the process that the user started. It starts an agent per host, shows what the ranks write, and decides
//! when the run is over and what it died of.

mod agent_link;
mod door;
mod labelled_output;
mod leading;
mod process;
mod restarts;
mod run;
mod verdict;

use std::io::stdout;
use std::net::TcpStream;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::config::{LaunchConfig, secret_variable};
use super::host::Host;
use super::host_plan::HostPlan;
use super::layout::Layout;
use super::mpi::{self, Mpi};
use super::outcome::Outcome;
use super::say::say;
use super::wire::Report;
use super::{dry_run, member, process_tree, program, signals, thread};
use crate::{Error, Result, has_no_reader, write_whole};
use door::Door;
use labelled_output::{LabelledOutput, RankOutputs};
use process::Process;
use restarts::Restarts;
use run::RunningRanks;
use verdict::{HostLoss, RankEnd};

/// The exit code where nothing was started.
const NOT_STARTED_EXIT_CODE: u8 = 2;

/// What the front's main thread hears.
enum FrontEvent {
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
    /// An agent is gone.
    Gone(HostLoss),
}

/// Runs `candle-train launch`; the last thing it prints is why the run failed, if it did.
pub fn launch(config: &LaunchConfig) -> ExitCode {
    let outcome = try_launch(config).unwrap_or_else(|error| not_started(&error));
    if let Some(sentence) = outcome.sentence {
        say(&sentence);
    }
    if let (0, Some(error)) = (outcome.exit_code, labelled_output::lost()) {
        say(&format!("cannot write to stdout: {error}"));
        return ExitCode::FAILURE;
    }
    ExitCode::from(outcome.exit_code)
}

fn not_started(error: &Error) -> Outcome {
    Outcome::last(NOT_STARTED_EXIT_CODE, Some(error.to_string()))
}

fn try_launch(config: &LaunchConfig) -> Result<Outcome> {
    let known = Host::known(config)?;
    let place = leading::place_of(config)?;
    let num_ranks = known.iter().map(|host| host.num_ranks).sum();
    let through_mpi = mpi::is_asked(config, num_ranks);
    let layout = Layout::new(config, &known, 0, through_mpi)?;
    if known.iter().any(|host| host.is_here) {
        let plan = &layout.hosts[0];
        program::find(&plan.program, Path::new(&plan.folder))?;
    }
    if config.dry_run {
        let mut text = Vec::new();
        let printed = dry_run::print(&layout, &mut text);
        return match printed.and_then(|()| write_whole(&mut stdout(), &text)) {
            Err(error) if !has_no_reader(&error) => {
                Err(Error::Launch(format!("cannot write to stdout: {error}")))
            }
            _ => Ok(Outcome::last(0, None)),
        };
    }
    if let Some(place) = place.as_ref().filter(|place| place.listener.is_none()) {
        return member::serve(config, &place.front, &place.secret);
    }
    let (sender, events) = mpsc::channel();
    let on_signal = sender.clone();
    signals::watch(move |signal| drop(on_signal.send(FrontEvent::Signal(signal))))?;
    // What an agent that is killed leaves behind becomes ours.
    process_tree::adopt_orphans()?;
    let door = place.and_then(|place| {
        let (at, program) = ((place.front, place.secret), Some(config.program.clone()));
        Some(Door::open(place.listener?, at, program, &sender))
    });
    let door = door.transpose()?;
    let restarts = Restarts::new(config, known, door.clone(), through_mpi)?;
    let front = Front {
        config,
        sender,
        events,
        door,
        restarts,
    };
    Ok(front.run())
}

/// The launcher that starts ranks.
struct Front<'a> {
    config: &'a LaunchConfig,
    sender: Sender<FrontEvent>,
    events: Receiver<FrontEvent>,
    /// Where agents and hosts call, if any are to.
    door: Option<Arc<Door>>,
    restarts: Restarts,
}

impl Front<'_> {
    /// Starts ranks until there is nothing more to start, and tells the launchers that have called.
    fn run(mut self) -> Outcome {
        let outcome = self.run_all().unwrap_or_else(|error| not_started(&error));
        if let Some(door) = self.door.filter(|door| door.is_secret_given()) {
            let others = self.restarts.present.iter().filter(|host| !host.is_here);
            let others = others.map(|host| host.name.as_str()).collect();
            let sentence = outcome.sentence.as_deref().unwrap_or_default();
            let first = sentence.lines().next().unwrap_or_default();
            door.close(outcome.exit_code, first, others);
        }
        outcome
    }

    fn run_all(&mut self) -> Result<Outcome> {
        loop {
            if let Some(outcome) = self.restarts.gather(&self.events) {
                return Ok(outcome);
            }
            let outcome = self.run_once()?;
            if let Some(outcome) = self.restarts.after(outcome) {
                if let (0, number @ 1..) = (outcome.exit_code, self.restarts.num_restarts) {
                    say(&format!("the run is complete, after {number} restarts"));
                }
                return Ok(outcome);
            }
        }
    }

    /// Starts the ranks and waits until nothing is left of them.
    fn run_once(&mut self) -> Result<Outcome> {
        let (hosts, num_restarts) = (&self.restarts.present, self.restarts.num_restarts);
        let layout = Layout::new(self.config, hosts, num_restarts, self.restarts.through_mpi)?;
        let outputs = open_outputs(&layout, self.config.log_dir.as_deref())?;
        let mpi = layout.mpi.as_ref().map(|mpi| self.start_mpi(mpi));
        let mpi = mpi.transpose()?;
        let run = RunningRanks::start(&layout, outputs, mpi, &self.sender)?;
        Ok(run.drive(&self.events, || self.restarts.change()))
    }

    /// Has MPI start the agents, which call at the door; its end becomes an event.
    fn start_mpi(&mut self, mpi: &Mpi) -> Result<Pid> {
        let other_host = self.restarts.present.iter().find(|host| !host.is_here);
        let door = match self.door.take() {
            Some(door) => door,
            None => Door::for_agents(other_host, &self.sender)?,
        };
        let door = self.door.insert(door);
        let secret = (!door.is_secret_given()).then_some(&door.secret);
        let mut command = mpi.command(&door.address, secret);
        command.envs(secret_variable(self.config.short_secret));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let name = mpi.words[0].clone();
        let process = Process::start(&mut command, &format!("[{name}] "))?;
        let (pid, events) = (process.pid(), self.sender.clone());
        thread::start(move || {
            let how = format!("{name} has ended ({})", process.end(None).0);
            let _ = events.send(FrontEvent::MpiEnded(pid, how));
        });
        Ok(pid)
    }
}

/// Two outputs for each rank of each host.
fn open_outputs(layout: &Layout, log_dir: Option<&Path>) -> Result<Vec<RankOutputs>> {
    if let Some(dir) = log_dir {
        std::fs::create_dir_all(dir).map_err(|error| {
            let dir = dir.display();
            Error::Launch(format!("cannot create log folder {dir}: {error}"))
        })?;
    }
    let of_host = |plan: &HostPlan| {
        let ranks = plan.first_rank..plan.first_rank + plan.num_ranks;
        let of_rank = |rank| LabelledOutput::of_rank(rank, log_dir);
        ranks.map(of_rank).collect()
    };
    layout.hosts.iter().map(of_host).collect()
}
