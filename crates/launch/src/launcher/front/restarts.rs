//! Starting all ranks again, after a failure or on more hosts.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::outcome::{Outcome, Remedy};
use super::room::Room;
use super::{Event, say, stopped_by};
use crate::launcher::config::{LaunchConfig, NodeRange};
use crate::launcher::end::LOST_HOST_EXIT_CODE;
use crate::launcher::shares::{self, Share};
use crate::{Error, Result};

/// As long as hosts come that the run can use, and this long after the last of them, it waits for more.
const MORE_WAIT: Duration = Duration::from_secs(3);

/// Hosts that are missing after an end of the ranks may be back within this time.
const PATIENCE: Duration = Duration::from_secs(300);

/// A host that is needed is back at once, to wait for the next time: one that is away for so long leaves.
const AWAY: Duration = Duration::from_secs(10);

/// The hosts of a run, and how often its ranks may still be started on them.
pub(super) struct Restarts {
    max_restarts: usize,
    nodes: NodeRange,
    /// Failures after which they were started again.
    num_failures: usize,
    num_restarts: usize,
    /// Hosts that are always asked, and those that ask.
    known: Vec<Share>,
    room: Option<Arc<Room>>,
    /// Hosts that are not asked any more, as they could not start their ranks: names, and the launchers that have called.
    set_aside: Vec<(String, u64)>,
    /// Those to start ranks on.
    present: Vec<Share>,
    /// Why the ranks were ended that are to be started again.
    last_end: Option<String>,
}

/// What comes after an end of the ranks.
pub(super) enum Next {
    /// They are started again, for this reason, at this time if not at once.
    Start(String, Option<Instant>),
    /// They are started again, on the hosts that are there.
    ChangeHosts,
    /// They are started again, through MPI.
    ThroughMpi,
    /// That was the last one.
    End(Outcome),
}

impl Restarts {
    /// Of hosts that are known, and of those that come to the room.
    ///
    /// # Errors
    /// Options about restarts that contradict the others.
    pub(super) fn new(
        config: &LaunchConfig,
        known: Vec<Share>,
        room: Option<Arc<Room>>,
    ) -> Result<Self> {
        let num_hosts = known.len();
        let is_file = config.hostfile.is_some();
        let problem = match config.nnodes {
            Some(nodes) if is_file && nodes.max > num_hosts => format!(
                "--nnodes: expected at most the {num_hosts} hosts of the host file, got {}",
                nodes.max
            ),
            Some(nodes) if is_file && config.rdzv.is_some() && nodes.min < num_hosts => {
                "--nnodes and --rdzv: the host where the ranks meet may be the one that is lost\n\
                 hint: without --rdzv they meet on the first host that is left"
                    .to_string()
            }
            nodes => {
                let all = NodeRange {
                    min: num_hosts,
                    max: num_hosts,
                };
                return Ok(Self {
                    max_restarts: config.max_restarts,
                    nodes: match &room {
                        None if !is_file => all,
                        _ => nodes.unwrap_or(all),
                    },
                    num_failures: 0,
                    num_restarts: 0,
                    present: Vec::new(),
                    set_aside: Vec::new(),
                    last_end: None,
                    known,
                    room,
                });
            }
        };
        Err(Error::Launch(problem))
    }

    /// How often the ranks were started before.
    pub(super) fn num_restarts(&self) -> usize {
        self.num_restarts
    }

    /// The hosts to start them on.
    pub(super) fn hosts(&self) -> Vec<Share> {
        shares::numbered(self.present.iter().cloned())
    }

    /// Waits until there are hosts enough, unless a signal comes before, or those that the ranks were started on do not come back: then
    /// it says how this launcher ends.
    pub(super) fn gather(&mut self, events: &Receiver<Event>) -> Option<(u8, Option<String>)> {
        let begin = Instant::now();
        let mut last_came = begin;
        let mut has_said = false;
        loop {
            let num_before = self.present.len();
            self.present = self.candidates();
            let num_hosts = self.present.len();
            if num_hosts > num_before {
                last_came = Instant::now();
            }
            let is_full = self.room.is_none() || num_hosts == self.nodes.max;
            if is_full || num_hosts >= self.nodes.min && last_came.elapsed() > MORE_WAIT {
                return None;
            }
            if num_hosts < self.nodes.min && last_came.elapsed() > MORE_WAIT && !has_said {
                has_said = true;
                let min = self.nodes.min;
                say(&format!(
                    "{num_hosts} of at least {min} hosts are there; waiting for more"
                ));
            }
            if let Ok(Event::Signal(signal)) = events.recv_timeout(MORE_WAIT / 10) {
                return Some(stopped_by(signal));
            }
            if let Some(cause) = &self.last_end
                && begin.elapsed() > PATIENCE
            {
                let (min, secs) = (self.nodes.min, PATIENCE.as_secs());
                let what = format!(
                    "{cause}\n{num_hosts} of at least {min} hosts are there, after {secs} s"
                );
                return Some((LOST_HOST_EXIT_CODE, Some(what)));
            }
        }
    }

    fn candidates(&self) -> Vec<Share> {
        let offers = self.room.iter().flat_map(|room| room.offers());
        let shares = offers.map(|offer| Share {
            name: offer.name,
            id: offer.id,
            is_here: false,
            node_rank: 0,
            first_rank: 0,
            num_ranks: offer.num_ranks,
        });
        let all = self.known.iter().cloned().chain(shares);
        let all = all.filter(|share| {
            let mut aside = self.set_aside.iter();
            !aside.any(|(name, id)| *name == share.name && *id == share.id)
        });
        all.take(self.nodes.max).collect()
    }

    /// Whether hosts have come that can be used while ranks run, or have left, and have been away for a while: in words.
    pub(super) fn change(&self, away: &mut Option<Instant>) -> Option<String> {
        let leaver = self.leaver();
        if leaver.is_none() {
            *away = None;
        }
        if let Some(name) = leaver
            && away.get_or_insert_with(Instant::now).elapsed() > AWAY
        {
            return Some(format!("host {name} leaves"));
        }
        Some(format!("host {} is there", self.newcomer()?))
    }

    /// A host whose launcher waits no more, though ranks run there.
    fn leaver(&self) -> Option<String> {
        let offers = self.room.as_ref()?.offers();
        let is_away = |host: &&Share| offers.iter().all(|offer| offer.name != host.name);
        let mut others = self.present.iter().filter(|host| !host.is_here);
        Some(others.find(is_away)?.name.clone())
    }

    /// A host that has come while ranks run, if it can be used.
    fn newcomer(&self) -> Option<String> {
        let is_present = |host: &Share| self.present.iter().any(|other| other.name == host.name);
        let is_full = self.room.is_none() || self.present.len() == self.nodes.max;
        let mut new = (!is_full).then(|| self.candidates())?.into_iter();
        Some(new.find(|host| !is_present(host))?.name)
    }

    /// What is to be done after the ranks have ended.
    pub(super) fn after(&mut self, outcome: Outcome) -> Next {
        let Some(sentence) = &outcome.sentence else {
            return Next::End(outcome);
        };
        let why = sentence.lines().next().unwrap_or_default().to_string();
        self.last_end = Some(why.clone());
        match &outcome.remedy {
            Remedy::ThroughMpi => Next::ThroughMpi,
            Remedy::ChangeHosts => {
                self.num_restarts += 1;
                Next::ChangeHosts
            }
            _ if self.max_restarts == 0 && self.num_restarts == 0 => Next::End(outcome),
            Remedy::None(reason) if reason.is_empty() => Next::End(outcome),
            Remedy::None(reason) => {
                let note = format!("the ranks are not started again: {reason}");
                Next::End(outcome.with_note(&note))
            }
            Remedy::StartAgain { .. } if self.num_failures == self.max_restarts => {
                let note = format!("--max-restarts {} are used up", self.max_restarts);
                Next::End(outcome.with_note(&note))
            }
            Remedy::StartAgain { at, lost } => {
                if let Some(room) = &self.room {
                    room.remove(lost);
                }
                self.num_restarts += 1;
                self.num_failures += 1;
                // Hosts that were lost may be back.
                if self.room.is_none() {
                    self.set_aside.clear();
                }
                let (number, of) = (self.num_failures, self.max_restarts);
                let wait = at.map(|at| at.saturating_duration_since(Instant::now()));
                let wait = wait.map_or(String::new(), |wait| {
                    format!(
                        ", in {} s, when its ranks have ended too",
                        wait.as_secs() + 1
                    )
                });
                Next::Start(format!("{why}; restart {number} of {of}{wait}"), *at)
            }
            // What is wrong at the first start is wrong.
            Remedy::Without(_) if self.num_restarts == 0 => Next::End(outcome),
            Remedy::Without(hosts) => {
                let without = self
                    .present
                    .iter()
                    .filter(|host| hosts.contains(&host.name));
                let without = without.map(|host| (host.name.clone(), host.id));
                self.set_aside.extend(without);
                let num_before = self.present.len();
                let left = self.candidates().len();
                let (all, least) = (num_before.max(self.known.len()), self.nodes.min);
                let left_of = format!("{left} of {all} hosts are left");
                if left < least || hosts.is_empty() {
                    let note = format!("{left_of}, and --nnodes asks for {least}");
                    return Next::End(Outcome {
                        exit_code: LOST_HOST_EXIT_CODE,
                        ..outcome.with_note(&note)
                    });
                }
                Next::Start(format!("{why}; {left_of}"), None)
            }
        }
    }
}
