//! What the server knows of the ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::exchange::{Exchange, Reply};
use super::{ControlConfig, report};
use crate::Secret;
use crate::control::activity::Snapshot;
use crate::control::clock::RunClock;
use crate::control::hello::Hello;
use crate::control::message::{FromRank, ToRank};
use crate::control::wire;
use crate::control::{Failure, RankGroup};

/// What the server knows of the ranks, under one lock. Nothing is written or read under it, only queued.
pub(super) struct Hub {
    /// Rank 0's: what all have to match.
    pub(super) own: Hello,
    pub(super) secret: Secret,
    pub(super) join_timeout: Duration,
    pub(super) rank_timeout: Duration,
    pub(super) clock: RunClock,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    pub peers: Vec<Option<Peer>>,
    /// The groups that ranks are in, by id.
    pub groups: HashMap<String, RankGroup>,
    /// Whether all ranks have come.
    pub started: bool,
    /// The ranks that cannot start, and why; and since when there is one.
    pub unable: BTreeMap<usize, String>,
    pub unable_since: Option<Duration>,
    /// Why the run does not start, and the ranks that have been told.
    pub refusal: Option<String>,
    pub told: BTreeSet<usize>,
    /// Why the run ends.
    pub failure: Option<Failure>,
    /// Will be why, unless a better reason comes within a moment.
    pub held: Option<Failure>,
    exchange: Exchange,
}

/// A rank that is in.
pub(super) struct Peer {
    pub host: String,
    pub pid: u32,
    /// What it last said it does, and when it last said anything.
    pub snapshot: Snapshot,
    pub heard: Duration,
    /// It has said goodbye.
    pub left: bool,
    /// It has said that it failed, and why.
    pub failed: Option<String>,
    /// It knows why the run ends.
    pub noted: bool,
    /// Its connection has closed.
    pub gone: bool,
    pub queue: Sender<Arc<Vec<u8>>>,
    pub stream: TcpStream,
}

impl Peer {
    pub(super) fn send(&self, message: &ToRank, body: &[u8]) {
        match wire::frame(message, body) {
            Ok(frame) => self.queue(&Arc::new(frame)),
            Err(error) => tracing::error!("a message to rank 0's peers was not sent: {error}"),
        }
    }

    fn queue(&self, frame: &Arc<Vec<u8>>) {
        // The connection may have closed: its reader says so.
        let _ = self.queue.send(frame.clone());
    }
}

impl State {
    /// The ranks that are in, with their numbers.
    pub(super) fn present(&self) -> impl Iterator<Item = (usize, &Peer)> {
        let peers = self.peers.iter().enumerate();
        peers.filter_map(|(rank, peer)| Some((rank, peer.as_ref()?)))
    }

    pub(super) fn missing(&self) -> Vec<usize> {
        let ranks = 0..self.peers.len();
        ranks.filter(|rank| self.peers[*rank].is_none()).collect()
    }

    /// Tells all ranks.
    pub(super) fn broadcast(&self, message: &ToRank) {
        match wire::frame(message, &[]) {
            Ok(frame) => {
                let frame = Arc::new(frame);
                self.present().for_each(|(_, peer)| peer.queue(&frame));
            }
            Err(error) => tracing::error!("a message to all ranks was not sent: {error}"),
        }
    }

    fn reply(&self, replies: Vec<Reply>) {
        for Reply {
            rank,
            id,
            answer,
            body,
        } in replies
        {
            if let Some(peer) = &self.peers[rank] {
                peer.send(&ToRank::Answer { id, answer }, &body);
            }
        }
    }

    /// Answers what will never be complete because ranks have left.
    fn answer_without_left(&mut self, now: Duration) {
        let left = self.present().filter(|(_, peer)| peer.left);
        let left: Vec<usize> = left.map(|(rank, _)| rank).collect();
        if left.is_empty() {
            return;
        }
        let report = report::all(&self.peers, now);
        let replies = self.exchange.without(&left, &report);
        self.reply(replies);
    }
}

impl Hub {
    pub(super) fn new(config: &ControlConfig) -> Self {
        let own = Hello::new(config);
        let state = State {
            peers: (0..own.world_size).map(|_| None).collect(),
            groups: HashMap::new(),
            started: false,
            unable: BTreeMap::new(),
            unable_since: None,
            refusal: None,
            told: BTreeSet::new(),
            failure: None,
            held: None,
            exchange: Exchange::default(),
        };
        Self {
            own,
            secret: config.secret.clone(),
            join_timeout: config.join_timeout,
            rank_timeout: config.rank_timeout,
            clock: RunClock::new(config.rank_timeout),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(super) fn world_size(&self) -> usize {
        self.own.world_size
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// A message of a rank that is in.
    pub(super) fn handle(self: &Arc<Self>, rank: usize, message: FromRank, body: Vec<u8>) {
        let now = self.clock.now();
        let mut state = self.lock();
        let Some(peer) = &mut state.peers[rank] else {
            return;
        };
        peer.heard = now;
        match message {
            FromRank::Beat(snapshot) => peer.snapshot = snapshot,
            FromRank::Group(group) => drop(state.groups.insert(group.id.clone(), group)),
            FromRank::Ask { id, question } => {
                let replies = (state.exchange).ask((rank, id), question, body, self.world_size());
                state.reply(replies);
                state.answer_without_left(now);
            }
            FromRank::Failed {
                kind,
                message,
                snapshot,
            } => {
                peer.snapshot = snapshot;
                peer.failed = Some(message.clone());
                self.hold(&mut state, rank, kind, &message);
            }
            FromRank::Late {
                secs,
                group,
                seq,
                snapshot,
            } => {
                peer.snapshot = snapshot;
                self.late(&mut state, rank, secs, &group, seq);
            }
            FromRank::Noted => {
                peer.noted = true;
                self.notify();
            }
            FromRank::Leave(snapshot) => {
                peer.snapshot = snapshot;
                peer.left = true;
                if rank > 0 {
                    peer.send(&ToRank::Goodbye, &[]);
                }
                state.answer_without_left(now);
                if state.present().all(|(_, peer)| peer.left)
                    && let Some(zero) = &state.peers[0]
                {
                    zero.send(&ToRank::Goodbye, &[]);
                }
            }
        }
    }

    /// Twice a second: says that this process is alive, and looks whether the others are.
    pub(super) fn tick(self: &Arc<Self>) {
        let now = self.clock.tick();
        let mut state = self.lock();
        if state.started {
            if let Some(zero) = &state.peers[0] {
                let beat = ToRank::Beat(zero.snapshot.clone());
                state.broadcast(&beat);
            }
            self.find_silent(&mut state, now);
        } else if state.refusal.is_none() {
            let missing = state.missing();
            state.broadcast(&ToRank::Waiting { missing });
            self.find_unable(&mut state, now);
            self.find_overdue(&mut state, now);
        }
    }

    /// Blocks until every rank knows why the run ends, or does not start; returns at once if it goes on.
    pub(super) fn wait_until_known(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            let known = match (&state.refusal, &state.failure) {
                (Some(_), _) => state.told.len() == state.peers.len(),
                (None, Some(_)) => state.all_noted(),
                (None, None) => true,
            };
            let rest = until.saturating_duration_since(Instant::now());
            if known || rest.is_zero() {
                return;
            }
            (state, _) = self
                .changed
                .wait_timeout(state, rest)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Closes all connections.
    pub(super) fn close(&self) {
        for peer in self.lock().peers.iter_mut().filter_map(Option::take) {
            // Nothing to do about one that is closed already.
            let _ = peer.stream.shutdown(std::net::Shutdown::Read);
        }
    }
}
