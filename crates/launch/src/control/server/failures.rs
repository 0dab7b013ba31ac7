//! Ranks that die, fall silent, fail or are late.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::hub::{Hub, Peer, State};
use super::{report, spawn};
use crate::control::activity::GroupProgress;
use crate::control::failure::{DIED_HINT, SILENT_HINT, died, silent};
use crate::control::message::ToRank;
use crate::control::{BEAT, Failure, FailureKind, RankGroup, SAME_WORDS};

/// How long a rank's word that it failed is held back. It may have failed because another one died, which shows as a
/// closed connection at about the same time.
const HOLD: Duration = Duration::from_millis(500);

impl State {
    /// Whether everybody who can hear of the failure has.
    pub(super) fn all_noted(&self) -> bool {
        let mut present = self.present();
        present.all(|(_, peer)| peer.noted || peer.left || peer.gone)
    }

    /// What all ranks say that they failed of, if it is the same.
    fn failed_alike(&self) -> Option<String> {
        let words = |peer: &Option<Peer>| peer.as_ref()?.failed.clone();
        let first = words(self.peers.first()?)?;
        let mut others = self.peers.iter().skip(1);
        others
            .all(|peer| words(peer).as_ref() == Some(&first))
            .then_some(first)
    }

    /// Whether ranks that have not failed still compute.
    fn may_fail_alike(&self) -> bool {
        let is_held = |held: &Failure| held.kind == FailureKind::Failed;
        let unfailed = || self.present().filter(|(_, peer)| peer.failed.is_none());
        self.held.as_ref().is_some_and(is_held)
            && unfailed().count() > 0
            && unfailed().all(|(_, peer)| !peer.left && peer.snapshot.blocked_in().is_none())
    }

    /// Ends the run for this reason, if it has not ended.
    fn announce(&mut self, failure: Failure) {
        if self.failure.is_some() {
            return;
        }
        self.broadcast(&ToRank::Failed(failure.clone()));
        self.failure = Some(failure);
    }

    /// An operation that is not complete and what it waits for, in words: the members that have not come to it and, as long as
    /// these are blocked in another operation that has not been `seen`, what that one waits for.
    fn obstacle(
        &self,
        group: &RankGroup,
        seq: Option<u64>,
        seen: &mut Vec<(String, u64)>,
    ) -> String {
        let Some(seq) = seq else {
            return format!("an operation of {group}");
        };
        let place = format!("operation number {seq} of {group}");
        let members_where = |is_so: &dyn Fn(&GroupProgress) -> bool| -> Vec<usize> {
            let peer = |rank: usize| self.peers.get(rank).and_then(Option::as_ref);
            let progress = |rank| peer(rank).map(|peer| peer.snapshot.progress(group));
            let members = group.members.iter().copied();
            members
                .filter(|rank| is_so(&progress(*rank).unwrap_or_default()))
                .collect()
        };
        let not_called = members_where(&|progress| progress.begun <= seq);
        let not_reached = members_where(&|progress| progress.reached <= seq);
        let absent = match (not_called.is_empty(), not_reached.is_empty()) {
            (false, _) => not_called,
            (true, false) => {
                let ranks = report::rank_list(&not_reached);
                return format!("{place}, to which the GPU of {ranks} has not come");
            }
            (true, true) => {
                let past = members_where(&|progress| progress.completed > seq);
                return match past.as_slice() {
                    [] => format!("{place}, in which all its ranks are"),
                    past => format!("{place}, which is over on {}", report::rank_list(past)),
                };
            }
        };
        let called = absent.iter().filter_map(|rank| {
            let peer = self.peers[*rank].as_ref()?;
            Some(peer.snapshot.progress(group).begun)
        });
        let earlier = match called.min() {
            Some(first) if first < seq => format!(", nor number {first} before it"),
            _ => String::new(),
        };
        let ranks = report::rank_list(&absent);
        let place = format!("{place}, which {ranks} did not call{earlier}");
        seen.push((group.id.clone(), seq));
        let blocked_in = |rank: &usize| {
            let (id, seq) = self.peers[*rank].as_ref()?.snapshot.blocked_in()?;
            Some((*rank, self.groups.get(id)?, seq))
        };
        let elsewhere: Option<Vec<_>> = absent.iter().map(blocked_in).collect();
        match elsewhere.as_deref() {
            Some([(rank, group, next), ..])
                if !next.is_some_and(|next| seen.contains(&(group.id.clone(), next))) =>
            {
                format!(
                    "{place}: rank {rank} is in {}",
                    self.obstacle(group, *next, seen)
                )
            }
            _ => place,
        }
    }
}

impl Hub {
    /// A rank's connection has closed.
    pub(super) fn gone(&self, rank: usize, why: &io::Error) {
        let now = self.clock.now();
        let mut state = self.lock();
        if !state.started {
            // It may come again.
            state.peers[rank] = None;
            return;
        }
        let Some(peer) = &mut state.peers[rank] else {
            return;
        };
        peer.gone = true;
        if !peer.left && peer.failed.is_none() {
            let message = format!(
                "{} {}\n  its last operation: {}\n{DIED_HINT}",
                report::peer_name(rank, peer),
                died(why),
                report::last(peer, now)
            );
            state.announce(Failure {
                kind: FailureKind::Died,
                rank: Some(rank),
                message,
            });
        }
        self.notify();
    }

    /// A rank says that it failed: that is why the run ends, unless another one turns out to have died.
    pub(super) fn hold(
        self: &Arc<Self>,
        state: &mut State,
        rank: usize,
        kind: FailureKind,
        why: &str,
    ) {
        let Some(peer) = &state.peers[rank] else {
            return;
        };
        if state.failure.is_some() {
            return;
        }
        let verb = match kind {
            FailureKind::Terminated => "was told to end",
            _ => "failed",
        };
        let message = format!(
            "{} {verb}: {why}\n  its last operation: {}",
            report::peer_name(rank, peer),
            report::last(peer, self.clock.now())
        );
        let failure = Failure {
            kind,
            rank: Some(rank),
            message,
        };
        match &state.held {
            None => {
                state.held = Some(failure);
                let hub = self.clone();
                let spawned = spawn("control-hold", move || {
                    std::thread::sleep(HOLD);
                    // All may be about to say that they failed, of the same.
                    let mut rest = SAME_WORDS;
                    while !rest.is_zero() && hub.lock().may_fail_alike() {
                        std::thread::sleep(BEAT / 10);
                        rest = rest.saturating_sub(BEAT / 10);
                    }
                    hub.announce_held(&mut hub.lock());
                });
                if spawned.is_err() {
                    self.announce_held(state);
                }
            }
            // Launchers tell all ranks to end when one has failed.
            Some(held) if held.kind == FailureKind::Terminated => state.held = Some(failure),
            Some(_) => {}
        }
    }

    fn announce_held(&self, state: &mut State) {
        if let Some(failure) = state.held.take() {
            let is_failed = failure.kind == FailureKind::Failed;
            state.announce(match state.failed_alike().filter(|_| is_failed) {
                Some(message) => Failure {
                    kind: FailureKind::Failed,
                    rank: None,
                    message,
                },
                None => failure,
            });
        }
    }

    /// A rank has been blocked for longer than its deadline.
    pub(super) fn late(
        &self,
        state: &mut State,
        rank: usize,
        secs: f64,
        group: &RankGroup,
        seq: Option<u64>,
    ) {
        let message = format!(
            "rank {rank} is blocked for more than {secs} s, the deadline, in {}\n{}\n\
             hint: a rank may be stuck, or the ranks call operations in different orders; a slow machine may need a longer \
             deadline",
            state.obstacle(group, seq, &mut Vec::new()),
            report::all(&state.peers, self.clock.now())
        );
        state.announce(Failure {
            kind: FailureKind::Deadline,
            rank: None,
            message,
        });
    }

    /// Ends the run if ranks have said nothing for too long, all of which are named.
    pub(super) fn find_silent(&self, state: &mut State, now: Duration) {
        let silence = |heard: Duration| now.saturating_sub(heard);
        let silent_for = |limit: Duration| {
            let here = (state.present()).filter(|(_, peer)| !peer.left && !peer.gone);
            here.filter(move |(_, peer)| silence(peer.heard) > limit)
        };
        if state.failure.is_some() || silent_for(self.rank_timeout).next().is_none() {
            return;
        }
        // Ranks behind the same cut fall silent within a beat.
        let lost: Vec<_> = silent_for(self.rank_timeout * 5 / 6).collect();
        let lines = lost.iter().map(|(rank, peer)| {
            format!(
                "{} {}\n  its last operation: {}",
                report::peer_name(*rank, peer),
                silent(silence(peer.heard)),
                report::last(peer, now)
            )
        });
        let lines: Vec<String> = lines.collect();
        let message = format!("{}\n{SILENT_HINT}", lines.join("\n"));
        let rank = lost.first().map(|(rank, _)| *rank);
        state.announce(Failure {
            kind: FailureKind::Died,
            rank,
            message,
        });
    }
}
