//! What the server knows of a run: events come in, messages to ranks go out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::exchange::{Exchange, Reply};
use crate::control::activity::Snapshot;
use crate::control::message::{FromRank, Hello, ToRank};
use crate::control::wire::{self, Outbox};
use crate::control::{BEAT, ControlConfig, Failure, FailureKind, RankGroup};

/// What the server knows of a run: events come in, messages to ranks go out. Times are those of the server's clock.
pub(super) struct ServedRun {
    pub config: ControlConfig,
    /// Rank 0's: what all have to match.
    pub own: Hello,
    pub peers: Vec<Option<Peer>>,
    /// The groups that ranks are in, by id.
    pub groups: HashMap<String, RankGroup>,
    /// Whether all ranks have come.
    pub started: bool,
    is_closed: bool,
    /// The ranks that cannot start, and why; and since when there is one.
    pub unable: BTreeMap<usize, String>,
    pub unable_since: Option<Duration>,
    /// Why the run does not start, and the ranks that have been told.
    pub refusal: Option<String>,
    pub told: BTreeSet<usize>,
    /// Why the run ends.
    pub failure: Option<Failure>,
    /// Will be why, unless a better reason comes within a moment; and since when there is one.
    pub held: Option<(Failure, Duration)>,
    exchange: Exchange,
    /// The number of the next connection.
    pub next_connection: u64,
}

/// A rank that is in.
pub(super) struct Peer {
    pub hello: Hello,
    /// The number of its connection: a rank whose earlier one broke off has another one.
    pub connection: u64,
    pub outbox: Outbox,
    /// What it last said it does, and when it last said anything.
    pub snapshot: Snapshot,
    pub heard: Duration,
    /// It has said something since the start.
    pub has_spoken: bool,
    /// It has said goodbye.
    pub left: bool,
    /// It has said that it failed, and why.
    pub failed: Option<String>,
    /// It knows why the run ends.
    pub noted: bool,
    /// Its connection has closed.
    pub gone: bool,
}

impl Peer {
    /// Who it is and, after `between`, what it did last.
    pub fn report(&self, between: &str, now: Duration) -> String {
        let last = self.snapshot.describe(now.saturating_sub(self.heard));
        let left = if self.left { ", then left the run" } else { "" };
        format!("{}{between}: {last}{left}", self.hello.name())
    }
}

impl ServedRun {
    pub fn new(config: &ControlConfig) -> Self {
        Self {
            config: config.clone(),
            own: Hello::new(config),
            peers: (0..config.world_size).map(|_| None).collect(),
            groups: HashMap::new(),
            started: false,
            is_closed: false,
            unable: BTreeMap::new(),
            unable_since: None,
            refusal: None,
            told: BTreeSet::new(),
            failure: None,
            held: None,
            exchange: Exchange::default(),
            next_connection: 0,
        }
    }

    /// The ranks that are in, with their numbers.
    pub fn present(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let peers = self.peers.iter().enumerate();
        peers.filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    pub fn missing(&self) -> Vec<usize> {
        let ranks = 0..self.peers.len();
        ranks.filter(|rank| self.peers[*rank].is_none()).collect()
    }

    /// Tells all ranks.
    pub fn broadcast(&self, message: &ToRank) {
        match wire::frame(message, &[]) {
            Ok(frame) => {
                let frame = Arc::new(frame);
                (self.present()).for_each(|(_, peer)| peer.outbox.put(frame.clone()));
            }
            Err(error) => tracing::error!("a message to all ranks was not sent: {error}"),
        }
    }

    /// A message of a rank that is in.
    pub fn hear(&mut self, rank: usize, message: FromRank, body: Vec<u8>, now: Duration) {
        let Some(peer) = &mut self.peers[rank] else {
            return;
        };
        peer.heard = now;
        peer.has_spoken = true;
        match message {
            FromRank::Beat(snapshot) => peer.snapshot = snapshot,
            FromRank::Group(group) => drop(self.groups.insert(group.id.clone(), group)),
            FromRank::Ask { id, question } => {
                let world_size = self.peers.len();
                let reply = self.exchange.ask((rank, id), question, body, world_size);
                reply.into_iter().for_each(|reply| self.reply(reply));
                self.answer_without_left(now);
            }
            FromRank::Failed { kind, message } => {
                peer.failed = Some(message.clone());
                self.hold(rank, kind, &message, now);
            }
            FromRank::Noted => peer.noted = true,
            FromRank::Leave => {
                peer.left = true;
                if rank > 0 {
                    peer.outbox.tell(&ToRank::Goodbye);
                }
                self.answer_without_left(now);
                if self.present().all(|(_, peer)| peer.left)
                    && let Some(zero) = &self.peers[0]
                {
                    zero.outbox.tell(&ToRank::Goodbye);
                }
            }
        }
    }

    fn reply(&mut self, Reply { to, answer, body }: Reply) {
        for (rank, id) in to {
            let answer = answer.clone();
            if let Some(peer) = &self.peers[rank]
                && let Err(error) = peer.outbox.send(&ToRank::Answer { id, answer }, &body)
            {
                let message = format!("rank 0 cannot pass on what the ranks said: {error}");
                return self.announce(FailureKind::Failed, None, message);
            }
        }
    }

    /// Answers what will never be complete because ranks have left.
    fn answer_without_left(&mut self, now: Duration) {
        let left = self.present().filter(|(_, peer)| peer.left);
        let left: Vec<usize> = left.map(|(rank, _)| rank).collect();
        if !left.is_empty() {
            let replies = self.exchange.without(&left, &self.report(now));
            replies.into_iter().for_each(|reply| self.reply(reply));
        }
    }

    /// One line per rank: what it did last.
    pub fn report(&self, now: Duration) -> String {
        let line = |(rank, peer): (usize, &Option<Peer>)| match peer {
            Some(peer) => format!("  {}", peer.report("", now)),
            None => format!("  rank {rank}: not there"),
        };
        let lines: Vec<_> = self.peers.iter().enumerate().map(line).collect();
        lines.join("\n")
    }

    /// Says that this process is alive, and looks whether the others are; how long until the next time, `None` when there is nothing
    /// left to watch.
    pub fn tick(&mut self, now: Duration) -> Option<Duration> {
        if self.started {
            if let Some(zero) = &self.peers[0] {
                self.broadcast(&ToRank::Beat(zero.snapshot.clone()));
            }
            self.find_silent(now);
            self.find_circle(now);
            self.find_late(now);
            self.find_held(now);
        } else if self.refusal.is_none() {
            let missing = self.missing();
            self.broadcast(&ToRank::Waiting { missing });
            self.find_unable(now);
            self.find_overdue(now);
        }
        let interval = self.config.beat_interval();
        let pause = match self.held {
            Some(_) => interval.min(BEAT / 10),
            None => interval,
        };
        (!self.is_closed).then_some(pause)
    }

    /// Whether all ranks know why the run ends, or does not start, if it does.
    pub fn is_known(&self) -> bool {
        match (&self.refusal, &self.failure) {
            (Some(_), _) => (0..self.peers.len()).all(|rank| self.told.contains(&rank)),
            (None, Some(_)) => {
                (self.present()).all(|(_, peer)| peer.noted || peer.left || peer.gone)
            }
            (None, None) => true,
        }
    }

    /// Closes all connections.
    pub fn close(&mut self) {
        self.is_closed = true;
        self.peers.fill_with(|| None);
    }
}

/// "rank 2" or "ranks 1, 3".
pub(in crate::control) fn rank_list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", names.join(", "))
}
