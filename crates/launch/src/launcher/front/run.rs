//! The ranks from their start to their end.

use std::io::{Write, stderr};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::agent_link::AgentLink;
use super::outcome::{Outcome, Remedy};
use super::verdict::{Cause, Failures, HostLoss, describe_signal, place};
use super::{Event, NOT_STARTED_EXIT_CODE, RankEnd};
use crate::launcher::agent::ALIVE_INTERVAL;
use crate::launcher::layout::Layout;
use crate::launcher::process_tree::KILL_DEADLINE;
use crate::launcher::wire::{Command, Report};

/// Agents have this long to say that they can run their plan.
pub(super) const START_DEADLINE: Duration = Duration::from_secs(60);
/// After a failure the others have this long to say what they know of it, and the cause to show up.
const CAUSE_WAIT: Duration = Duration::from_secs(1);
/// Terminals and `timeout` may deliver a signal twice; only after this time is it a second one.
const REPEAT_WAIT: Duration = Duration::from_secs(1);
/// An agent that has nothing left to kill ends within this time.
const AGENT_WAIT: Duration = Duration::from_secs(5);

/// Why ranks are not started again.
pub(super) const SURVIVORS: &str = "processes are left that SIGKILL does not end";

/// Why ranks that ask for MPI are not started through it.
const ASKED_AGAIN: &str = "the ranks ask for MPI, though MPI has started them: the program finds no sign of an MPI that it knows";

/// How often the links are looked at.
const MAX_WAIT: Duration = Duration::from_millis(500);

/// What is known of the ranks that were started.
pub(super) struct Run<'a> {
    layout: &'a Layout,
    agents: Vec<AgentLink>,
    has_survivors: bool,
    hosts: Vec<HostState>,
    /// Whether a host has been silent for too long.
    silent: Vec<bool>,
    /// Hosts that cannot run their plan, and why.
    refusals: Vec<(String, String)>,
    failures: Failures,
    /// Ranks that have failed and without which the others go on.
    lost: Vec<RankEnd>,
    signal: Option<(Signal, Instant)>,
    start_deadline: Option<Instant>,
    started: bool,
    /// When the ranks have to be told to end, and when they were.
    stop_due: Option<Instant>,
    stopped_at: Option<Instant>,
    /// When agents that are still there are given up.
    give_up_at: Option<Instant>,
    /// What started the agents, if MPI did; that it has ended, and when agents that are still there are lost with it.
    mpi: Option<Pid>,
    mpi_ended: Option<(String, Instant)>,
    /// Hosts have come or leave, for which the ranks were asked to stop.
    change: Option<String>,
    /// Ranks that have done so.
    num_asked: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostState {
    Asked,
    Ready,
    Finished,
    Gone,
}

impl<'a> Run<'a> {
    pub(super) fn new(layout: &'a Layout, agents: Vec<AgentLink>, mpi: Option<Pid>) -> Self {
        Self {
            layout,
            hosts: vec![HostState::Asked; agents.len()],
            silent: vec![false; agents.len()],
            agents,
            has_survivors: false,
            refusals: Vec::new(),
            failures: Failures::new(layout.hosts.iter().map(|host| host.plan.num_ranks).sum()),
            lost: Vec::new(),
            signal: None,
            start_deadline: Some(Instant::now() + START_DEADLINE),
            started: false,
            stop_due: None,
            stopped_at: None,
            give_up_at: None,
            mpi,
            mpi_ended: None,
            change: None,
            num_asked: 0,
        }
    }

    /// Until all agents are gone.
    pub(super) fn drive(
        mut self,
        events: &Receiver<Event>,
        mut change: impl FnMut() -> Option<String>,
    ) -> Outcome {
        while self.hosts.iter().any(|state| *state != HostState::Gone) {
            if let Ok(event) = events.recv_timeout(self.next_wait()) {
                self.note(event);
            }
            if self.started && self.change.is_none() {
                change().into_iter().for_each(|what| self.stop_for(what));
            }
            self.keep_deadlines();
        }
        self.outcome()
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Signal(signal) => self.note_signal(signal),
            Event::Ended(end) => self.note_rank_end(end),
            Event::Report(host, Report::Ready) => {
                self.hosts[host] = HostState::Ready;
                let all_ready = self.hosts.iter().all(|state| *state == HostState::Ready);
                if all_ready && self.start_deadline.take().is_some() {
                    self.started = true;
                    self.tell_all(|| Command::Start);
                }
            }
            Event::Report(host, Report::Refused(sentence)) => {
                self.hosts[host] = HostState::Finished;
                let name = self.layout.hosts[host].name.clone();
                let sentence = format!("host {name}: {sentence}");
                self.refusals.push((name, sentence));
                self.close_all();
            }
            Event::Report(host, Report::Survivors(pids)) => {
                self.has_survivors = true;
                warn_survivors(&self.layout.hosts[host].name, &pids);
            }
            Event::Report(host, Report::Finished) => self.hosts[host] = HostState::Finished,
            Event::MpiEnded(pid, how) if Some(pid) == self.mpi => {
                self.mpi_ended = Some((how, Instant::now() + AGENT_WAIT));
            }
            Event::Report(_, _) | Event::Called { .. } | Event::MpiEnded(..) => {}
            Event::Gone {
                host,
                detail,
                last_lines,
            } => {
                let was_finished = self.hosts[host] == HostState::Finished;
                self.hosts[host] = HostState::Gone;
                if !was_finished {
                    let detail = match (self.silent[host], &self.mpi_ended) {
                        (true, _) => "nothing was heard from it for --silence-secs".to_string(),
                        (false, Some((how, _))) => how.clone(),
                        (false, None) => detail,
                    };
                    self.failures.hosts.push(HostLoss {
                        host,
                        lost_at: Instant::now(),
                        detail,
                        last_lines,
                    });
                    self.stop_soon();
                }
            }
        }
    }

    fn note_rank_end(&mut self, end: RankEnd) {
        // One that stops may be noticed by others before they have stopped themselves.
        let is_stop = end.end.is_asked_for() || end.end.is_due_to_peer();
        if self.change.is_some() && is_stop {
            self.num_asked += 1;
            return;
        }
        if end.end.is_success() {
            return;
        }
        let is_ending = self.signal.is_some() || !self.failures.is_empty();
        let is_for_all = end.end.needs_mpi() || end.end.would_fail_again();
        let may_go_on = !is_ending && !is_for_all;
        if end.rank > 0 && self.lost.len() < self.layout.may_lose && may_go_on {
            let place = place(&end, &self.layout.hosts);
            super::say(&format!(
                "{place} failed: {}; the others go on, as --may-lose says",
                end.end
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
            Some(_) => self.stop(Duration::ZERO),
            None => {
                self.signal = Some((signal, Instant::now()));
                if self.start_deadline.is_some() {
                    return self.close_all();
                }
                // Before a change of hosts they were asked to stop already, and a second signal would end them before they have saved.
                if self.change.is_none() {
                    self.tell_all(|| Command::Signal(signal as i32));
                    // The ranks know already; what is due after the grace time is the killing.
                    self.stop_due = Some(Instant::now() + self.layout.grace_after_signal);
                }
            }
        }
    }

    /// Asks the ranks to stop as a signal would, so that they can be started again on other hosts.
    fn stop_for(&mut self, change: String) {
        if self.signal.is_none() && self.failures.is_empty() {
            super::say(&format!("{change}: the ranks stop, and are started again"));
            self.change = Some(change);
            self.tell_all(|| Command::Signal(Signal::SIGTERM as i32));
            self.stop_due = Some(Instant::now() + self.layout.grace_after_signal);
        }
    }

    fn stop_soon(&mut self) {
        if self.start_deadline.is_some() {
            return self.close_all();
        }
        if self.stopped_at.is_none() {
            let soon = Instant::now() + CAUSE_WAIT;
            self.stop_due = match self.stop_due {
                // The others have the grace time to save.
                Some(due) if self.signal.is_some() => Some(due),
                due => Some(due.map_or(soon, |due| due.min(soon))),
            };
        }
    }

    /// Ends a run that has not started.
    fn close_all(&mut self) {
        self.start_deadline = None;
        self.stopped_at.get_or_insert_with(Instant::now);
        self.give_up_at = Some(Instant::now() + AGENT_WAIT);
        self.agents.iter_mut().for_each(AgentLink::close);
    }

    fn stop(&mut self, grace: Duration) {
        self.stop_due = None;
        self.stopped_at.get_or_insert_with(Instant::now);
        self.give_up_at = Some(Instant::now() + grace + KILL_DEADLINE + AGENT_WAIT);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.tell_all(|| Command::Stop { grace_ms });
    }

    fn tell_all(&self, command: impl Fn() -> Command) {
        self.agents.iter().for_each(|agent| agent.send(command()));
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
        let orphaned_at = self.mpi_ended.as_ref().map(|(_, at)| *at);
        let give_up = [self.give_up_at, orphaned_at];
        let give_up = give_up.into_iter().flatten().any(|at| now >= at);
        for (index, agent) in self.agents.iter().enumerate() {
            let limit = self.layout.hosts[index]
                .plan
                .silence_ms
                .map(Duration::from_millis);
            let is_silent = limit.is_some_and(|limit| agent.silence() > limit);
            self.silent[index] |= is_silent;
            if self.hosts[index] != HostState::Gone && (give_up || is_silent) {
                agent.kill();
            }
        }
    }

    /// The hosts that did not answer keep the ranks from being started.
    fn give_up_late_hosts(&mut self) {
        let states = self.hosts.iter().enumerate();
        let late = states.filter(|(_, state)| **state == HostState::Asked);
        for (host, _) in late {
            self.failures.hosts.push(HostLoss {
                host,
                lost_at: Instant::now(),
                detail: format!("no answer within {} s", START_DEADLINE.as_secs()),
                last_lines: Vec::new(),
            });
        }
        self.close_all();
    }

    fn next_wait(&self) -> Duration {
        let due = [self.start_deadline, self.stop_due, self.give_up_at];
        let now = Instant::now();
        let waits = due
            .iter()
            .flatten()
            .map(|at| at.saturating_duration_since(now));
        waits
            .min()
            .unwrap_or(MAX_WAIT)
            .clamp(Duration::from_millis(1), MAX_WAIT)
    }

    fn outcome(&self) -> Outcome {
        let hosts = &self.layout.hosts;
        if let Some((signal, at)) = self.signal {
            let signal = signal as i32;
            if let Some(cause) = self.failures.cause(Some(at)) {
                return Outcome::last(cause.exit_code(), Some(cause.describe(hosts)));
            }
            let is_complete = self.started && self.failures.is_empty() && self.num_asked == 0;
            let code = match is_complete {
                true => 0,
                false => 128 + signal as u8,
            };
            return Outcome::last(code, Some(describe_signal(signal, &self.failures.ranks)));
        }
        if let Some(change) = &self.change
            && self.num_asked > 0
            && self.failures.is_empty()
        {
            return Outcome {
                exit_code: 0,
                sentence: Some(change.clone()),
                remedy: Remedy::ChangeHosts,
            };
        }
        let is_refused = !self.refusals.is_empty();
        if !self.started && (is_refused || !self.failures.is_empty()) {
            return self.not_started();
        }
        let in_time = self.failures.cause(self.stopped_at);
        let Some(cause) = in_time.or_else(|| self.failures.cause(None)) else {
            return Outcome::last(0, None);
        };
        if cause.needs_mpi() {
            let outcome = Outcome::last(cause.exit_code(), Some(cause.describe(hosts)));
            return match self.mpi {
                None => Outcome {
                    remedy: Remedy::ThroughMpi,
                    ..outcome
                },
                Some(_) => outcome.with_note(ASKED_AGAIN),
            };
        }
        let lost = || self.failures.hosts.iter();
        let remedy = match (cause.is_for_good(), self.has_survivors) {
            (Some(why), _) => Remedy::None(why),
            (None, true) => Remedy::None(SURVIVORS.to_string()),
            (None, false) => Remedy::StartAgain {
                at: lost().map(|loss| self.is_surely_over(loss)).max(),
                lost: lost().map(|loss| hosts[loss.host].name.clone()).collect(),
            },
        };
        Outcome {
            exit_code: cause.exit_code(),
            sentence: Some(cause.describe(hosts)),
            remedy,
        }
    }

    /// The hosts that refused, or else that were lost, before the others were told to end.
    fn not_started(&self) -> Outcome {
        let (mut without, mut sentences): (Vec<_>, Vec<_>) = self.refusals.iter().cloned().unzip();
        if sentences.is_empty() {
            let in_time = |loss: &&HostLoss| self.stopped_at.is_none_or(|at| loss.lost_at <= at);
            let lost = self.failures.hosts.iter().filter(in_time);
            for loss in lost {
                without.push(self.layout.hosts[loss.host].name.clone());
                sentences.push(Cause::Host(loss).describe(&self.layout.hosts));
            }
        }
        Outcome {
            exit_code: NOT_STARTED_EXIT_CODE,
            sentence: Some(sentences.join("\n")),
            remedy: Remedy::Without(without),
        }
    }

    /// When the ranks of a host that is lost have been ended by its agent, which may live.
    fn is_surely_over(&self, loss: &HostLoss) -> Instant {
        let plan = &self.layout.hosts[loss.host].plan;
        let Some(silence_ms) = plan.silence_ms else {
            return loss.lost_at;
        };
        loss.lost_at + Duration::from_millis(silence_ms + plan.grace_ms) + ALIVE_INTERVAL
    }
}

/// Says which processes could not be ended.
pub(super) fn warn_survivors(host: &str, pids: &[i32]) {
    let _ = writeln!(
        stderr(),
        "candle-train: processes {pids:?} on {host} do not end by SIGKILL: they hang in the kernel"
    );
}
