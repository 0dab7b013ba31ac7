//! Starting all ranks again, after a failure or on more hosts.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::door::Door;
use super::verdict::describe_signal;
use super::{FrontEvent, say};
use crate::launcher::config::{LaunchConfig, NodeRange};
use crate::launcher::end::{CANNOT_GO_ON_EXIT_CODE, LOST_HOST_EXIT_CODE};
use crate::launcher::host::Host;
use crate::launcher::outcome::{Outcome, Remedy};
use crate::{Error, Result, SpokenWait, WaitNotices};

/// As long as hosts come that the run can use, and this long after the last of them, it waits for more.
const MORE_WAIT: Duration = Duration::from_secs(3);

/// Hosts that are missing after an end of the ranks may be back within this time.
const PATIENCE: Duration = Duration::from_secs(300);

/// A host that is needed is back at once, to wait for the next time: one that is away for so long leaves.
const AWAY: Duration = Duration::from_secs(10);

/// The hosts of a run, and how often its ranks may still be started on them.
pub(super) struct Restarts {
    wait_notices: WaitNotices,
    max_restarts: usize,
    nodes: NodeRange,
    /// Failures after which they were started again.
    num_failures: usize,
    /// How often the ranks were started before.
    pub(super) num_restarts: usize,
    /// When they may be started again.
    start_at: Instant,
    /// Whether MPI starts them.
    pub(super) through_mpi: bool,
    /// Hosts that are always asked, and those that ask.
    known: Vec<Host>,
    door: Option<Arc<Door>>,
    /// Hosts that are not asked any more, as they could not start their ranks: the launchers, if they have called.
    set_aside: Vec<Host>,
    /// Hosts that came and with which the ranks could not run, until another one comes or one is lost: then they may.
    misfits: Vec<Host>,
    /// Those to start ranks on.
    pub(super) present: Vec<Host>,
    /// Those that ranks last ran on.
    fitting: Vec<Host>,
    /// When hosts were first missing that the ranks were asked to stop for.
    away_since: Option<Instant>,
    /// Why the ranks were ended that are to be started again.
    last_end: Option<String>,
}

impl Restarts {
    /// Of hosts that are known, and of those that come to the door.
    ///
    /// # Errors
    /// Options about restarts that contradict the others.
    pub(super) fn new(
        config: &LaunchConfig,
        known: Vec<Host>,
        door: Option<Arc<Door>>,
        through_mpi: bool,
    ) -> Result<Self> {
        let num_hosts = known.len();
        let is_file = config.hostfile.is_some();
        let problem = |what: String| Err(Error::Launch(what));
        match config.nnodes.filter(|_| is_file) {
            Some(nodes) if nodes.max > num_hosts => {
                return problem(format!(
                    "--nnodes: expected at most the {num_hosts} hosts of the host file, got {}",
                    nodes.max
                ));
            }
            Some(nodes) if config.rdzv.is_some() && nodes.min < num_hosts => {
                return problem(
                    "--nnodes and --rdzv: the host where the ranks meet may be the one that is lost\n\
                     hint: without --rdzv they meet on the first host that is left"
                        .to_string(),
                );
            }
            _ => {}
        }
        let all = NodeRange {
            min: num_hosts,
            max: num_hosts,
        };
        let nodes = config.nnodes.filter(|_| is_file || door.is_some());
        Ok(Self {
            wait_notices: config.wait_notices,
            max_restarts: config.max_restarts,
            nodes: nodes.unwrap_or(all),
            num_failures: 0,
            num_restarts: 0,
            start_at: Instant::now(),
            through_mpi,
            known,
            door,
            set_aside: Vec::new(),
            misfits: Vec::new(),
            present: Vec::new(),
            fitting: Vec::new(),
            away_since: None,
            last_end: None,
        })
    }

    /// Waits until it is time to start the ranks, and there are hosts enough, unless a signal comes before, or those that the ranks were
    /// started on do not come back: then it says how this launcher ends.
    pub(super) fn gather(&mut self, events: &Receiver<FrontEvent>) -> Option<Outcome> {
        if let Some(signal) = wait(events, self.start_at) {
            return Some(signal);
        }
        let begin = Instant::now();
        let mut last_came = begin;
        let mut has_said = false;
        let mut spoken = None;
        loop {
            let num_before = self.present.len();
            self.present = self.candidates();
            let (num_hosts, min) = (self.present.len(), self.nodes.min);
            if num_hosts > num_before {
                last_came = Instant::now();
            }
            let is_late = last_came.elapsed() > MORE_WAIT;
            let is_full = self.door.is_none() || num_hosts == self.nodes.max;
            if is_full || num_hosts >= min && is_late {
                return None;
            }
            let what = format!("{num_hosts} of at least {min} hosts are there");
            if is_late && !has_said {
                has_said = true;
                say(&format!("{what}; waiting for more"));
            }
            let spoken = spoken.get_or_insert_with(|| {
                SpokenWait::begin(self.wait_notices, "candle-train: the launcher that leads")
            });
            spoken.say(self.missing_in_words());
            if let Some(signal) = wait(events, Instant::now() + MORE_WAIT / 10) {
                return Some(signal);
            }
            if let Some(cause) = &self.last_end
                && begin.elapsed() > PATIENCE
            {
                let what = format!("{cause}\n{what}, after {} s", PATIENCE.as_secs());
                return Some(Outcome::last(LOST_HOST_EXIT_CODE, Some(what)));
            }
        }
    }

    /// Where the launcher waits for hosts, for how many more, and who is there.
    fn missing_in_words(&self) -> String {
        let address = self.door.as_ref().map_or("", |door| &door.address);
        let names: Vec<_> = self.present.iter().map(|host| host.name.as_str()).collect();
        let missing = self.nodes.min.saturating_sub(names.len());
        format!(
            "at {address} for {missing} more of at least {} hosts; there: {}",
            self.nodes.min,
            names.join(", ")
        )
    }

    fn candidates(&self) -> Vec<Host> {
        let offers = self.door.iter().flat_map(|door| door.hosts());
        let all = self.known.iter().cloned().chain(offers);
        let is_aside = |host: &Host| {
            let mut aside = self.set_aside.iter().chain(&self.misfits);
            aside.any(|other| other.name == host.name && other.id == host.id)
        };
        let usable = all.filter(|host| !is_aside(host));
        usable.take(self.nodes.max).collect()
    }

    /// Whether hosts have come that can be used while ranks run, or have left, and have been away for a while: in words.
    pub(super) fn change(&mut self) -> Option<String> {
        let door = self.door.as_ref()?;
        let (there, candidates) = (door.hosts(), self.candidates());
        let is_among = |hosts: &[Host], host: &Host| hosts.iter().any(|it| it.name == host.name);
        let is_away = |host: &&Host| !host.is_here && !is_among(&there, host);
        match self.present.iter().find(is_away) {
            None => self.away_since = None,
            Some(leaver) => {
                let since = *self.away_since.get_or_insert_with(Instant::now);
                if since.elapsed() > AWAY {
                    self.misfits.clear();
                    return Some(format!("host {} leaves", leaver.name));
                }
            }
        }
        let is_new = |host: &&Host| !is_among(&self.present, host);
        let new = candidates.iter().find(is_new)?;
        if self.present.len() == self.nodes.max {
            return None;
        }
        let what = format!("host {} is there", new.name);
        self.misfits.clear();
        Some(what)
    }

    /// The hosts that came to those that the ranks ran on before. If all were there, perhaps for too short a time to find out that the ranks
    /// do not fit, the last one, if that is not needed.
    fn came_last(&self) -> Vec<Host> {
        if self.door.is_none() || self.fitting.is_empty() {
            return Vec::new();
        }
        let is_same = |a: &Host, b: &Host| a.name == b.name && a.num_ranks == b.num_ranks;
        let is_new = |host: &&Host| !self.fitting.iter().any(|it| is_same(it, host));
        let new: Vec<_> = self.present.iter().filter(is_new).cloned().collect();
        match self.present.last() {
            Some(last) if new.is_empty() && self.present.len() > self.nodes.min => {
                vec![last.clone()]
            }
            _ => new,
        }
    }

    /// What is to be done after the ranks have ended: the outcome, if that was the last start.
    pub(super) fn after(&mut self, outcome: Outcome) -> Option<Outcome> {
        let Some(sentence) = &outcome.sentence else {
            return Some(outcome);
        };
        let why = sentence.lines().next().unwrap_or_default().to_string();
        self.last_end = Some(why.clone());
        self.away_since = None;
        let cannot_go_on = outcome.exit_code == CANNOT_GO_ON_EXIT_CODE;
        // The layout may need another number of ranks, or these hosts cannot run theirs.
        let misfits: Vec<_> = match &outcome.remedy {
            Remedy::StartAgain { lost, refused, .. } if lost.is_empty() => {
                let came_last = self.came_last().into_iter();
                let is_misfit = |host: &Host| cannot_go_on || refused.contains(&host.name);
                came_last.filter(is_misfit).collect()
            }
            _ => Vec::new(),
        };
        if matches!(
            outcome.remedy,
            Remedy::ChangeHosts | Remedy::StartAgain { .. }
        ) && !cannot_go_on
            && misfits.is_empty()
        {
            self.fitting = self.present.clone();
        }
        match &outcome.remedy {
            Remedy::ThroughMpi => self.through_mpi = true,
            Remedy::ChangeHosts => self.num_restarts += 1,
            _ if self.max_restarts == 0 && self.num_restarts == 0 => return Some(outcome),
            Remedy::None => return Some(outcome),
            _ if !misfits.is_empty() => {
                let names: Vec<_> = misfits.iter().map(|host| host.name.as_str()).collect();
                let names = names.join(", ");
                say(&format!(
                    "{why}; the ranks go on without what came last: host {names}"
                ));
                self.misfits.extend(misfits);
                self.num_restarts += 1;
            }
            Remedy::NotAgain(reason) => {
                let note = format!("the ranks are not started again: {reason}");
                return Some(outcome.with_note(&note));
            }
            Remedy::StartAgain { .. } if self.num_failures == self.max_restarts => {
                let note = format!("--max-restarts {} are used up", self.max_restarts);
                return Some(outcome.with_note(&note));
            }
            Remedy::StartAgain { at, lost, .. } => {
                if !lost.is_empty() {
                    self.misfits.clear();
                }
                match &self.door {
                    Some(door) => door.remove(lost),
                    // Hosts that were lost may be back.
                    None => self.set_aside.clear(),
                }
                self.num_restarts += 1;
                self.num_failures += 1;
                self.start_at = at.unwrap_or(self.start_at);
                let wait = at.map(|at| at.saturating_duration_since(Instant::now()).as_secs() + 1);
                let wait = wait.map(|secs| format!(", in {secs} s, when its ranks have ended too"));
                let wait = wait.unwrap_or_default();
                let (number, of) = (self.num_failures, self.max_restarts);
                say(&format!("{why}; restart {number} of {of}{wait}"));
            }
            // What is wrong at the first start is wrong.
            Remedy::Without(_) if self.num_restarts == 0 => return Some(outcome),
            Remedy::Without(hosts) => {
                let without = self.present.iter();
                let without = without.filter(|host| hosts.contains(&host.name));
                self.set_aside.extend(without.cloned());
                self.misfits.clear();
                let all = self.present.len().max(self.known.len());
                let (left, least) = (self.candidates().len(), self.nodes.min);
                let left_of = format!("{left} of {all} hosts are left");
                if left < least || hosts.is_empty() {
                    let note = format!("{left_of}, and --nnodes asks for {least}");
                    let outcome = match hosts.is_empty() {
                        true => outcome,
                        false => outcome.with_note(&note),
                    };
                    return Some(Outcome {
                        exit_code: LOST_HOST_EXIT_CODE,
                        ..outcome
                    });
                }
                say(&format!("{why}; {left_of}"));
            }
        }
        None
    }
}

/// Until then, or until a signal, which ends the launcher.
fn wait(events: &Receiver<FrontEvent>, until: Instant) -> Option<Outcome> {
    loop {
        let rest = until.saturating_duration_since(Instant::now());
        match events.recv_timeout(rest) {
            Ok(FrontEvent::Signal(signal)) => {
                let sentence = describe_signal(signal, &[]);
                return Some(Outcome::last(128 + signal as u8, Some(sentence)));
            }
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}
