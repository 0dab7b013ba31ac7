//! Ranks that die, fall silent, fail or are late.

use std::io;
use std::time::Duration;

use super::run::{Peer, ServedRun, rank_list};
use crate::circle::circle;
use crate::control::activity::{BlockedIn, GroupProgress};
use crate::control::failure::{DIED_HINT, SILENT_HINT, died, silent};
use crate::control::message::ToRank;
use crate::control::{Failure, FailureKind, RankGroup, SAME_WORDS};

/// How long a rank's word that it failed is held back. It may have failed because another one died, which shows as a
/// closed connection at about the same time.
const HOLD: Duration = Duration::from_millis(500);

/// How long ranks must wait for each other in a circle before the run ends of it: another thread of one of them may be about to
/// bring what they wait for, and is not known before its first operation.
const CIRCLE: Duration = Duration::from_secs(3);

impl ServedRun {
    /// A rank's connection of this number has closed.
    pub fn lose(&mut self, rank: usize, connection: u64, why: &io::Error, now: Duration) {
        let peer = self.peers[rank].as_mut();
        let Some(peer) = peer.filter(|peer| peer.connection == connection) else {
            // It has come again before this one was found to be closed.
            return;
        };
        if !self.started {
            // It may come again.
            self.peers[rank] = None;
            return;
        }
        if !peer.has_spoken {
            // It may come again, if it has not heard of the start; else it is silent.
            return;
        }
        peer.gone = true;
        if !peer.left && peer.failed.is_none() {
            let between = format!(" {}\n  its last operation", died(why));
            let message = format!("{}\n{DIED_HINT}", peer.report(&between, now));
            self.announce(FailureKind::Died, Some(rank), message);
        }
    }

    /// Ends the run for this reason, if it has not ended.
    pub fn announce(&mut self, kind: FailureKind, rank: Option<usize>, message: String) {
        if self.failure.is_none() {
            let failure = Failure {
                kind,
                rank,
                message,
            };
            self.broadcast(&ToRank::Failed(failure.clone()));
            self.failure = Some(failure);
        }
    }

    /// A rank says that it failed: that is why the run ends, unless another one turns out to have died.
    pub fn hold(&mut self, rank: usize, kind: FailureKind, why: &str, now: Duration) {
        let Some(peer) = &self.peers[rank] else {
            return;
        };
        let since = match &self.held {
            None => now,
            // Launchers tell all ranks to end when one has failed.
            Some((held, since)) if held.kind == FailureKind::Terminated => *since,
            Some(_) => return,
        };
        let verb = match kind {
            FailureKind::Terminated => "was told to end",
            _ => "failed",
        };
        let failure = Failure {
            kind,
            rank: Some(rank),
            message: peer.report(&format!(" {verb}: {why}\n  its last operation"), now),
        };
        self.held = Some((failure, since));
    }

    /// Ends the run for the reason that is held back, when that has been long enough.
    pub fn find_held(&mut self, now: Duration) {
        let Some((held, since)) = &self.held else {
            return;
        };
        let is_failed = held.kind == FailureKind::Failed;
        // All may be about to say that they failed, of the same.
        let limit = match is_failed && self.may_fail_alike() {
            true => HOLD + SAME_WORDS,
            false => HOLD,
        };
        if now < *since + limit {
            return;
        }
        let held = held.clone();
        self.held = None;
        match self.failed_alike().filter(|_| is_failed) {
            Some(words) => self.announce(FailureKind::Failed, None, words),
            None => self.announce(held.kind, held.rank, held.message),
        }
    }

    /// What all ranks say that they failed of, if it is the same.
    fn failed_alike(&self) -> Option<String> {
        let mut words = self.peers.iter().map(|peer| peer.as_ref()?.failed.as_ref());
        let first = words.next()??;
        let are_alike = words.all(|other| other == Some(first));
        are_alike.then(|| first.clone())
    }

    /// Whether ranks that have not failed still compute.
    fn may_fail_alike(&self) -> bool {
        let mut unfailed = (self.present())
            .filter(|(_, peer)| peer.failed.is_none())
            .peekable();
        unfailed.peek().is_some()
            && unfailed.all(|(_, peer)| !peer.left && peer.snapshot.blocked.is_none())
    }

    /// Ends the run if ranks have said nothing for too long, all of which are named.
    pub fn find_silent(&mut self, now: Duration) {
        let limit = self.config.rank_timeout;
        let silence = |heard: Duration| now.saturating_sub(heard);
        // Ranks behind the same cut fall silent within a beat.
        let lost = (self.present())
            .filter(|(_, peer)| !peer.left && !peer.gone && silence(peer.heard) > limit * 5 / 6);
        let lost: Vec<_> = lost.collect();
        if !lost.iter().any(|(_, peer)| silence(peer.heard) > limit) {
            return;
        }
        let line = |(_, peer): &(usize, &Peer)| {
            let what = silent(silence(peer.heard));
            peer.report(&format!(" {what}\n  its last operation"), now)
        };
        let lines: Vec<String> = lost.iter().map(line).collect();
        let (first, message) = (lost[0].0, format!("{}\n{SILENT_HINT}", lines.join("\n")));
        self.announce(FailureKind::Died, Some(first), message);
    }

    /// Ends the run if a rank has been blocked for longer than the deadline.
    pub fn find_late(&mut self, now: Duration) {
        let secs = self.config.deadline.as_secs_f64();
        let late = self.present().find_map(|(rank, peer)| {
            let blocked = peer.snapshot.blocked.as_ref();
            let blocked = blocked.filter(|blocked| !peer.left && blocked.secs > secs)?;
            Some((rank, self.groups.get(&blocked.group)?, blocked.seq))
        });
        if self.failure.is_none()
            && let Some((rank, group, seq)) = late
        {
            let message = format!(
                "rank {rank} is blocked for more than {secs} s, the deadline, in {}\n{}\n\
                 hint: a rank may be stuck, or the ranks call operations in different orders (what saves, evaluates or gathers is \
                 every rank's call); a slow machine may need a longer deadline",
                self.obstacle(group, seq, &mut Vec::new()),
                self.report(now)
            );
            self.announce(FailureKind::Deadline, None, message);
        }
    }

    /// Ends the run if ranks wait for each other in different groups. Those whose GPUs wait are left to the deadline: their programs
    /// may go on and call what the others wait for.
    ///
    /// Old words make no false circle: a rank that had not called an operation when it spoke last keeps who waits for it waiting at that time
    /// too, and who only waits calls nothing.
    pub fn find_circle(&mut self, now: Duration) {
        if self.failure.is_some() || self.held.is_some() {
            return;
        }
        let num_ranks = self.peers.len();
        if let Some(circle) = circle(0..num_ranks, num_ranks, |rank| self.awaited(rank)) {
            let message = format!(
                "{} wait for each other in different groups\n{}\n\
                 hint: every rank must call the same operations in the same order; what saves, evaluates or gathers is every rank's \
                 call, not that of one (`if rank == 0`)",
                rank_list(&circle),
                self.report(now)
            );
            self.announce(FailureKind::Deadlock, None, message);
        }
    }

    /// The operation that a rank has waited for so long that it may be part of a circle, if that is all it does.
    fn only_waits(&self, rank: usize) -> Option<&BlockedIn> {
        let peer = self.peers.get(rank)?.as_ref()?;
        let blocked = peer.snapshot.blocked.as_ref()?;
        let is_all = blocked.is_all && blocked.secs >= CIRCLE.as_secs_f64();
        (is_all && !peer.left && !peer.gone && peer.failed.is_none()).then_some(blocked)
    }

    /// The ranks that have not called what a rank waits for and that only wait themselves.
    fn awaited(&self, rank: usize) -> Vec<usize> {
        let of_group = self.only_waits(rank).and_then(|blocked| {
            let group = self.groups.get(&blocked.group)?;
            Some((group, blocked.seq?))
        });
        let Some((group, seq)) = of_group else {
            return Vec::new();
        };
        let members = group.members.iter().copied();
        let awaited = members.filter(|member| self.progress(*member, group).begun <= seq);
        let awaited = awaited.filter(|member| self.only_waits(*member).is_some());
        awaited.collect()
    }

    fn progress(&self, rank: usize, group: &RankGroup) -> GroupProgress {
        let peer = self.peers.get(rank).and_then(Option::as_ref);
        let progress = peer.and_then(|peer| peer.snapshot.groups.get(&group.id));
        progress.copied().unwrap_or_default()
    }

    /// The operation in which a rank is blocked.
    fn blocked_in(&self, rank: usize) -> Option<(&RankGroup, Option<u64>)> {
        let blocked = self.peers.get(rank)?.as_ref()?.snapshot.blocked.as_ref()?;
        Some((self.groups.get(&blocked.group)?, blocked.seq))
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
        let members_where = |is_so: &dyn Fn(GroupProgress) -> bool| -> Vec<usize> {
            let is_so = |rank: &usize| is_so(self.progress(*rank, group));
            group.members.iter().copied().filter(is_so).collect()
        };
        let absent = members_where(&|progress| progress.begun <= seq);
        let begun = absent.iter().map(|rank| self.progress(*rank, group).begun);
        let Some(first) = begun.min() else {
            let not_reached = members_where(&|progress| progress.reached <= seq);
            let past = members_where(&|progress| progress.completed > seq);
            return match (not_reached.is_empty(), past.is_empty()) {
                (false, _) => {
                    let ranks = rank_list(&not_reached);
                    format!("{place}, to which the GPU of {ranks} has not come")
                }
                (true, true) => format!("{place}, in which all its ranks are"),
                (true, false) => format!("{place}, which is over on {}", rank_list(&past)),
            };
        };
        let earlier = match first < seq {
            true => format!(", nor number {first} before it"),
            false => String::new(),
        };
        let place = format!(
            "{place}, which {} did not call{earlier}",
            rank_list(&absent)
        );
        seen.push((group.id.clone(), seq));
        let elsewhere = absent.iter().map(|rank| self.blocked_in(*rank));
        let elsewhere: Option<Vec<_>> = elsewhere.collect();
        let is_seen =
            |group: &RankGroup, seq| seen.iter().any(|seen| *seen == (group.id.clone(), seq));
        match elsewhere.as_deref() {
            Some([(group, next), ..]) if !next.is_some_and(|next| is_seen(group, next)) => {
                let other = self.obstacle(group, *next, seen);
                format!("{place}: rank {} is in {other}", absent[0])
            }
            _ => place,
        }
    }
}
