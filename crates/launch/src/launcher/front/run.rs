//! The ranks from their start to their end.

mod outcome;
mod waits;

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::agent_link::{AgentLink, EXIT_WAIT};
use super::labelled_output::RankOutputs;
use super::verdict::{Failures, HostLoss, RankEnd, place};
use super::{FrontEvent, say};
use crate::launcher::end::{
    CANNOT_GO_ON_EXIT_CODE, NEEDS_MPI_EXIT_CODE, NOT_SAVED_EXIT_CODE, PEER_FAILED_EXIT_CODE,
    WOULD_FAIL_AGAIN_EXIT_CODE,
};
use crate::launcher::host_plan::HostPlan;
use crate::launcher::layout::Layout;
use crate::launcher::outcome::{Outcome, Remedy};
use crate::launcher::process_tree::{self, KILL_DEADLINE};
use crate::launcher::wire::{Command, Report};
use crate::{Result, SpokenWait};
use outcome::SURVIVORS;

/// Agents have this long to say that they can run their plan.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// After a failure the others have this long to say what they know of it, and the cause to show up.
const CAUSE_WAIT: Duration = Duration::from_secs(1);
/// Terminals and `timeout` may deliver a signal twice; only after this time is it a second one.
const REPEAT_WAIT: Duration = Duration::from_secs(1);
/// An agent that has nothing left to kill ends within this time.
const AGENT_WAIT: Duration = Duration::from_secs(5);
/// How often the links are looked at.
const MAX_WAIT: Duration = Duration::from_millis(500);

/// Ranks that end so have not begun, or trained to where they diverged: no other one can go on without them.
const NOT_BEGUN: [u8; 3] = [
    WOULD_FAIL_AGAIN_EXIT_CODE,
    NEEDS_MPI_EXIT_CODE,
    CANNOT_GO_ON_EXIT_CODE,
];

/// What is known of the ranks that were started.
pub(super) struct RunningRanks<'a> {
    layout: &'a Layout,
    events: &'a Sender<FrontEvent>,
    agents: Vec<RunningAgent<'a>>,
    has_survivors: bool,
    /// Why MPI has not started the ranks.
    refusal: Option<String>,
    failures: Failures,
    /// Ranks that have failed and without which the others go on.
    lost: Vec<RankEnd>,
    signal: Option<(Signal, Instant)>,
    /// A second one has come, and the ranks are killed.
    is_signalled_again: bool,
    start_deadline: Option<Instant>,
    /// As long as agents have not said that they can run their plan, or that run ranks say nothing.
    wait: Option<SpokenWait>,
    started: bool,
    /// When the ranks have to be told to end, and when they were.
    stop_due: Option<Instant>,
    stopped_at: Option<Instant>,
    /// When agents that are still there are given up, or what has started them.
    give_up_at: Option<Instant>,
    /// What starts the agents, if MPI does, as long as it runs; and how it has ended.
    mpi: Option<Pid>,
    mpi_ended: Option<String>,
    /// Hosts have come or leave, for which the ranks were asked to stop.
    change: Option<String>,
    /// Ranks that have done so.
    num_asked: usize,
}

struct RunningAgent<'a> {
    plan: &'a HostPlan,
    /// None as long as the agent has not called that MPI starts; then the outputs wait for it.
    link: Option<AgentLink>,
    outputs: Option<RankOutputs>,
    state: AgentState,
    /// Of its ranks, those that have ended.
    num_ended: usize,
    /// Whether it has been silent for too long.
    is_silent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgentState {
    Asked,
    Ready,
    Finished,
    Gone,
}

impl<'a> RunningRanks<'a> {
    /// Starts the agents, unless MPI does, in a process of this number.
    pub(super) fn start(
        layout: &'a Layout,
        outputs: Vec<RankOutputs>,
        mpi: Option<Pid>,
        events: &'a Sender<FrontEvent>,
    ) -> Result<Self> {
        let plans = layout.hosts.iter().zip(outputs).enumerate();
        let agents = plans.map(|(index, (plan, outputs))| {
            let (link, outputs) = match mpi {
                None => (Some(AgentLink::start(index, plan, outputs, events)?), None),
                Some(_) => (None, Some(outputs)),
            };
            Ok(RunningAgent {
                plan,
                link,
                outputs,
                state: AgentState::Asked,
                num_ended: 0,
                is_silent: false,
            })
        });
        Ok(Self {
            layout,
            events,
            agents: agents.collect::<Result<_>>()?,
            has_survivors: false,
            refusal: None,
            failures: Failures::default(),
            lost: Vec::new(),
            signal: None,
            is_signalled_again: false,
            start_deadline: Some(Instant::now() + START_DEADLINE),
            wait: None,
            started: false,
            stop_due: None,
            stopped_at: None,
            give_up_at: None,
            mpi,
            mpi_ended: None,
            change: None,
            num_asked: 0,
        })
    }

    /// Until all agents are gone, and what has started them, and nothing is left of the ranks here.
    pub(super) fn drive(
        mut self,
        events: &Receiver<FrontEvent>,
        mut change: impl FnMut() -> Option<String>,
    ) -> Outcome {
        while self.mpi.is_some() || !self.are_all(AgentState::Gone) {
            self.say_waits();
            if let Ok(event) = events.recv_timeout(self.next_wait()) {
                self.note(event);
            }
            if self.started && self.change.is_none() {
                change().into_iter().for_each(|what| self.stop_for(what));
            }
            self.keep_deadlines();
        }
        let survivors = process_tree::kill_descendants();
        if !survivors.is_empty() {
            let pids: Vec<_> = survivors.iter().map(|pid| pid.as_raw()).collect();
            self.note_survivors("this host", &pids);
        }
        let mut outcome = self.outcome();
        if self.has_survivors {
            outcome.remedy = Remedy::NotAgain(SURVIVORS.to_string());
        }
        outcome
    }

    fn are_all(&self, state: AgentState) -> bool {
        self.agents.iter().all(|agent| agent.state == state)
    }

    fn note(&mut self, event: FrontEvent) {
        match event {
            FrontEvent::Signal(signal) => self.note_signal(signal),
            FrontEvent::Ended(end) => self.note_rank_end(end),
            FrontEvent::Report(host, report) => self.note_report(host, report),
            FrontEvent::Called { rank, stream } => self.let_in(rank, stream),
            FrontEvent::MpiEnded(pid, how) if Some(pid) == self.mpi => {
                self.mpi = None;
                self.refuse_missing(&how);
                self.mpi_ended = Some(how);
                self.give_up_by(Instant::now() + AGENT_WAIT);
            }
            FrontEvent::MpiEnded(..) => {}
            FrontEvent::Gone(mut loss) => {
                // With nothing to end it, an agent sees the end of all its ranks.
                let is_undisturbed = self.failures.is_empty() && self.signal.is_none();
                let is_undisturbed = is_undisturbed && self.stopped_at.is_none();
                let agent = &mut self.agents[loss.host];
                let is_over = agent.num_ended == agent.plan.num_ranks || !is_undisturbed;
                let is_well = agent.state == AgentState::Finished && is_over;
                agent.state = AgentState::Gone;
                if !is_well {
                    if agent.is_silent {
                        loss.detail = "nothing was heard from it for --silence-secs".to_string();
                    } else if let Some(how) = &self.mpi_ended {
                        loss.detail = how.clone();
                    }
                    self.failures.hosts.push(loss);
                    self.stop_soon();
                }
            }
        }
    }

    fn note_report(&mut self, host: usize, report: Report) {
        let agent = &mut self.agents[host];
        match report {
            Report::Ready => {
                agent.state = AgentState::Ready;
                if self.are_all(AgentState::Ready) && self.start_deadline.take().is_some() {
                    self.started = true;
                    self.wait = None;
                    self.tell_all(|| Command::Start);
                }
            }
            Report::Refused(sentence) => {
                agent.state = AgentState::Finished;
                self.failures.hosts.push(HostLoss {
                    is_refusal: true,
                    ..HostLoss::now(host, sentence)
                });
                self.stop_soon();
            }
            Report::Survivors(pids) => {
                let host = &agent.plan.host;
                self.note_survivors(host, &pids);
            }
            Report::Finished => agent.state = AgentState::Finished,
            Report::Alive | Report::Output { .. } | Report::Ended { .. } => {}
        }
    }

    /// Processes that could not be ended.
    fn note_survivors(&mut self, host: &str, pids: &[i32]) {
        self.has_survivors = true;
        say(&format!(
            "processes {pids:?} on {host} do not end by SIGKILL: they hang in the kernel"
        ));
    }

    /// The agent of a rank that MPI has started has called.
    fn let_in(&mut self, rank: usize, stream: TcpStream) {
        if self.start_deadline.is_some()
            && let Some(agent) = self.agents.get_mut(rank)
            && let Some(outputs) = agent.outputs.take()
        {
            // To read and write, a socket is like another.
            let line = (OwnedFd::from(stream).into(), None);
            let link = AgentLink::new(rank, agent.plan, outputs, line, self.events);
            agent.link = Some(link);
            // Others may take their time.
            self.start_deadline = Some(Instant::now() + START_DEADLINE);
        }
    }

    /// If agents that MPI was to start have not called: they will not any more, for this reason.
    fn refuse_missing(&mut self, why: &str) {
        let missing = self.agents.iter().filter(|agent| agent.outputs.is_some());
        let (missing, all) = (missing.count(), self.agents.len());
        if let (1.., Some(mpi), Some(_)) = (missing, &self.layout.mpi, self.start_deadline) {
            let name = &mpi.words[0];
            self.refusal = Some(format!(
                "{name} did not start the ranks: {missing} of {all} are missing, {why}"
            ));
            self.close_all();
        }
    }

    fn note_rank_end(&mut self, end: RankEnd) {
        let agent = &mut self.agents[end.host];
        agent.num_ended += 1;
        let how = end.end;
        // One that stops may be noticed by others before they have stopped themselves.
        let codes = [PEER_FAILED_EXIT_CODE, NOT_SAVED_EXIT_CODE];
        let is_stop = how.stopped_by().is_some() || codes.iter().any(|code| how.has_code(*code));
        if self.change.is_some() && is_stop {
            self.num_asked += 1;
            return;
        }
        // An agent that refuses ends its ranks.
        if how.has_code(0) || agent.state == AgentState::Finished {
            return;
        }
        let is_ending = self.signal.is_some() || !self.failures.is_empty();
        let is_for_all = NOT_BEGUN.iter().any(|code| how.has_code(*code));
        let may_go_on = !is_ending && !is_for_all;
        if end.rank > 0 && self.lost.len() < self.layout.may_lose && may_go_on {
            let place = place(&end, &self.layout.hosts);
            say(&format!(
                "{place} failed: {how}; the others go on, as --may-lose says"
            ));
            self.lost.push(end);
            return;
        }
        // One of these may be why.
        self.failures.ranks.append(&mut self.lost);
        self.failures.ranks.push(end);
        self.stop_soon();
    }

    fn note_signal(&mut self, signal: Signal) {
        match self.signal {
            Some((_, first_at)) if first_at.elapsed() < REPEAT_WAIT => {}
            Some(_) => {
                self.is_signalled_again = true;
                self.stop(Duration::ZERO);
            }
            None => {
                self.signal = Some((signal, Instant::now()));
                if self.start_deadline.is_some() {
                    self.close_all();
                // Before a change of hosts they were asked to stop already, and a second signal would end them before they have saved.
                } else if self.change.is_none() {
                    let secs = self.layout.grace_after_signal.as_secs_f64();
                    say(&format!(
                        "{}: passed on to the ranks, which have {secs} s to end; again kills them at once",
                        signal.as_str()
                    ));
                    self.ask_to_stop(signal);
                }
            }
        }
    }

    /// Asks the ranks to stop as a signal would, so that they can be started again on other hosts.
    fn stop_for(&mut self, change: String) {
        if self.signal.is_none() && self.failures.is_empty() {
            say(&format!("{change}: the ranks stop, and are started again"));
            self.change = Some(change);
            self.ask_to_stop(Signal::SIGTERM);
        }
    }

    /// Passes a signal on: the ranks know then, and what is due after the grace time is the killing.
    fn ask_to_stop(&mut self, signal: Signal) {
        self.tell_all(|| Command::Signal(signal as i32));
        self.stop_due = Some(Instant::now() + self.layout.grace_after_signal);
    }

    fn stop_soon(&mut self) {
        if self.start_deadline.is_some() {
            self.close_all();
        } else if self.stopped_at.is_none() {
            let soon = Instant::now() + CAUSE_WAIT;
            self.stop_due = match self.stop_due {
                // The others have the grace time to save.
                Some(due) if self.signal.is_some() => Some(due),
                due => Some(due.map_or(soon, |due| due.min(soon))),
            };
        }
    }

    /// Hangs up on all agents of a run that has not started.
    fn close_all(&mut self) {
        self.start_deadline = None;
        self.stopped_at.get_or_insert_with(Instant::now);
        self.give_up_by(Instant::now() + AGENT_WAIT);
        for agent in &mut self.agents {
            match &mut agent.link {
                Some(link) => link.close(),
                None => agent.state = AgentState::Gone,
            }
        }
    }

    fn stop(&mut self, grace: Duration) {
        self.stop_due = None;
        self.stopped_at.get_or_insert_with(Instant::now);
        self.give_up_by(Instant::now() + grace + KILL_DEADLINE + AGENT_WAIT);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.tell_all(|| Command::Stop { grace_ms });
    }

    fn tell_all(&self, command: impl Fn() -> Command) {
        let links = self.agents.iter().filter_map(|agent| agent.link.as_ref());
        links.for_each(|link| link.send(command()));
    }

    fn give_up_by(&mut self, at: Instant) {
        self.give_up_at = Some(self.give_up_at.map_or(at, |earlier| earlier.min(at)));
    }

    fn keep_deadlines(&mut self) {
        let now = Instant::now();
        if self.start_deadline.is_some_and(|at| now >= at) {
            self.give_up_late_hosts();
        }
        if self.stop_due.is_some_and(|at| now >= at) {
            // After a signal the ranks have had their grace time.
            let grace = match self.signal {
                Some(_) => Duration::ZERO,
                None => self.layout.grace_after_failure,
            };
            self.stop(grace);
        }
        let are_all_gone = self.are_all(AgentState::Gone);
        if are_all_gone {
            // What has started them has no more to do.
            self.give_up_by(now + EXIT_WAIT);
        }
        let give_up = self.give_up_at.is_some_and(|at| now >= at);
        for agent in &mut self.agents {
            let Some(link) = &agent.link else { continue };
            let limit = agent.plan.silence_ms.map(Duration::from_millis);
            let is_silent = limit.is_some_and(|limit| link.silence() > limit);
            agent.is_silent |= is_silent;
            if agent.state != AgentState::Gone && (give_up || is_silent) {
                link.kill();
            }
        }
        if let (Some(pid), true) = (self.mpi, are_all_gone && give_up) {
            let _ = killpg(pid, Signal::SIGKILL);
            self.mpi = None;
        }
    }

    /// The hosts that did not answer keep the ranks from being started.
    fn give_up_late_hosts(&mut self) {
        let detail = format!("no answer within {} s", START_DEADLINE.as_secs());
        self.refuse_missing(&detail);
        let agents = self.agents.iter().enumerate();
        let late = agents.filter(|(_, agent)| agent.state == AgentState::Asked);
        let losses = late.map(|(host, _)| HostLoss::now(host, detail.clone()));
        self.failures.hosts.extend(losses);
        self.close_all();
    }

    fn next_wait(&self) -> Duration {
        let due = [self.start_deadline, self.stop_due, self.give_up_at];
        let next = due.into_iter().flatten().min();
        let wait = next.map(|at| at.saturating_duration_since(Instant::now()));
        wait.unwrap_or(MAX_WAIT)
            .clamp(Duration::from_millis(1), MAX_WAIT)
    }
}
