//! Ranks that die, fall silent, fail or are late.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::hub::{Hub, State};
use super::{report, spawn};
use crate::control::death::{DIED_HINT, SILENT_HINT, died, silent};
use crate::control::message::ToRank;
use crate::control::{BEAT, Failure, FailureKind, RankGroup, SILENCE};

/// How long a rank's word that it failed is held back. It may have failed because another one died, which shows as a
/// closed connection at about the same time.
const HOLD: Duration = Duration::from_millis(500);

impl State {
    /// Whether everybody who can hear of the failure has.
    pub(super) fn all_noted(&self) -> bool {
        let mut present = self.present();
        present.all(|(_, peer)| peer.noted || peer.left || peer.gone)
    }

    /// Ends the run for this reason, if it has not ended.
    fn announce(&mut self, failure: Failure) {
        if self.failure.is_some() {
            return;
        }
        self.broadcast(&ToRank::Failed(failure.clone()));
        self.failure = Some(failure);
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
        if !peer.left && !peer.failed {
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
            state.announce(failure);
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
        let there = |member: &usize| {
            let peer = state.peers.get(*member).and_then(Option::as_ref);
            peer.and_then(|peer| peer.snapshot.in_flight()) == Some((group.id.as_str(), seq))
        };
        let place = match seq {
            Some(seq) => format!("operation number {seq} of {group}"),
            None => format!("an operation of {group}"),
        };
        let absent: Vec<usize> = match seq {
            Some(_) => group
                .members
                .iter()
                .copied()
                .filter(|member| !there(member))
                .collect(),
            None => Vec::new(),
        };
        let absent = match absent.as_slice() {
            [] => String::new(),
            ranks => format!(
                ", which {} did not reach or has passed",
                report::rank_list(ranks)
            ),
        };
        let message = format!(
            "rank {rank} is blocked for more than {secs} s, the deadline, in {place}{absent}\n{}\n\
             hint: a rank may be stuck, or the ranks call operations in different orders; a slow machine may need a longer \
             deadline",
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
        if state.failure.is_some() || silent_for(SILENCE).next().is_none() {
            return;
        }
        // Ranks behind the same cut fall silent within a beat.
        let lost: Vec<_> = silent_for(SILENCE - 2 * BEAT).collect();
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
