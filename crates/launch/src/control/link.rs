//! A rank's end of its connection to rank 0's server.

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::activity::{Activity, Snapshot};
use super::clock::RunClock;
use super::failure::{self, DIED_HINT, SILENT_HINT, died, silent};
use super::message::{Answer, FromRank, Question, ToRank};
use super::wire::{self, Limits, Outbox, Timed};
use super::{ControlConfig, Failure, FailureKind, Operation, STOPS, spawn};
use crate::lock::lock;
use crate::{Error, Result};

/// A rank's end of the connection, shared by its threads: one reads, one writes, one beats.
pub(super) struct Link {
    pub(super) config: ControlConfig,
    /// Rank 0's.
    host_of_zero: String,
    clock: RunClock,
    outbox: Outbox,
    stream: TcpStream,
    state: Mutex<LinkState>,
    changed: Condvar,
}

#[derive(Default)]
struct LinkState {
    activity: Activity,
    /// When the server was last heard of, and what rank 0 then did.
    heard: Duration,
    zero: Snapshot,
    /// Why the run ends.
    failure: Option<Failure>,
    /// This rank has said that it failed, so.
    failed: Option<FailureKind>,
    /// The failure has been printed, or need not be.
    printed: bool,
    next_id: u64,
    answers: HashMap<u64, (Answer, Vec<u8>)>,
    /// This rank has said goodbye, and the server has answered.
    left: bool,
    goodbye: bool,
    closed: bool,
}

impl Link {
    /// Takes over a connection on which the server has said that all ranks are there.
    pub(super) fn start(
        config: &ControlConfig,
        host_of_zero: String,
        reader: BufReader<Timed>,
        stream: TcpStream,
    ) -> io::Result<Arc<Self>> {
        let link = Arc::new(Self {
            config: config.clone(),
            host_of_zero,
            clock: RunClock::new(config.rank_timeout),
            outbox: Outbox::start(stream.try_clone()?)?,
            stream,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let listening = link.clone();
        spawn("control-read", move || listening.listen(reader))?;
        let beating = link.clone();
        let interval = config.beat_interval();
        spawn("control-beat", move || {
            while beating.beat() {
                std::thread::sleep(interval);
            }
        })?;
        Ok(link)
    }

    /// The address from which this rank speaks to rank 0.
    pub(super) fn local_address(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.state).failure.clone()
    }

    /// Notes an operation that begins, and returns its id.
    pub(super) fn begin(&self, operation: Operation) -> u64 {
        let group = operation.group.clone();
        let (id, is_new) = self.update(|activity, now| activity.begin(operation, now));
        if is_new {
            self.outbox.tell(&FromRank::Group((*group).clone()));
        }
        id
    }

    /// Changes what this rank says that it does.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut Activity, Duration) -> T) -> T {
        let now = self.clock.now();
        change(&mut lock(&self.state).activity, now)
    }

    /// Asks the server and waits for the answer.
    pub(super) fn ask(&self, question: Question, body: &[u8]) -> Result<(Answer, Vec<u8>)> {
        let mut state = lock(&self.state);
        let id = state.next_id;
        state.next_id += 1;
        drop(state);
        let sent = self.outbox.send(&FromRank::Ask { id, question }, body);
        sent.map_err(|error| Error::Control(format!("a message to the other ranks: {error}")))?;
        let late = || {
            let rank = self.config.rank;
            let what = "asks the other ranks for something after it has left the run";
            Err(Error::Control(format!("rank {rank} {what}")))
        };
        self.wait_for(|state| match state.answers.remove(&id) {
            None if state.left => Some(late()),
            answer => answer.map(Ok),
        })?
    }

    /// Says goodbye and waits for the answer.
    pub(super) fn leave(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.left {
            state.left = true;
            self.tell_activity(&state);
            self.outbox.tell(&FromRank::Leave);
        }
        drop(state);
        self.wait_for(|state| state.goodbye.then_some(()))
    }

    /// Waits for something that comes, or for the end of the run.
    fn wait_for<T>(&self, come: impl Fn(&mut LinkState) -> Option<T>) -> Result<T> {
        let mut state = lock(&self.state);
        loop {
            if let Some(here) = come(&mut state) {
                return Ok(here);
            }
            if let Some(failure) = &state.failure {
                return Err(Error::RunFailed(failure.clone()));
            }
            state = (self.changed.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Says that this rank failed and waits, for at most `limit`, until the others know or another cause is known;
    /// returns the cause.
    pub(super) fn fail(
        &self,
        kind: FailureKind,
        message: String,
        limit: Duration,
    ) -> Option<Failure> {
        let mut state = lock(&self.state);
        if state.left {
            return None;
        }
        if state.failed.is_none() {
            state.failed = Some(kind);
            self.tell_activity(&state);
            self.outbox.tell(&FromRank::Failed { kind, message });
        }
        let is_unknown = |state: &mut LinkState| state.failure.is_none() || !state.printed;
        let waited = self.changed.wait_timeout_while(state, limit, is_unknown);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.failure.clone()
    }

    /// Closes the connection; without a goodbye the others take it for the death of this rank.
    pub(super) fn close(&self) {
        lock(&self.state).closed = true;
        // Nothing to do about a connection that is closed already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    pub(super) fn has_left(&self) -> bool {
        lock(&self.state).left
    }

    fn listen(self: &Arc<Self>, mut reader: BufReader<Timed>) {
        loop {
            match wire::read::<ToRank>(&mut reader, Limits::RANK) {
                Ok((message, body)) => self.handle(message, body),
                Err(error) => return self.lost(&died(&error), DIED_HINT),
            }
        }
    }

    fn handle(self: &Arc<Self>, message: ToRank, body: Vec<u8>) {
        let now = self.clock.now();
        let mut state = lock(&self.state);
        state.heard = now;
        match message {
            ToRank::Beat(snapshot) => state.zero = snapshot,
            ToRank::Answer { id, answer } => {
                state.answers.insert(id, (answer, body));
            }
            ToRank::Failed(failure) => self.end(&mut state, failure),
            ToRank::Goodbye => state.goodbye = true,
            // Of the rendezvous, which is over.
            ToRank::Waiting { .. } | ToRank::Welcome { .. } | ToRank::Refused { .. } => {}
        }
        self.changed.notify_all();
    }

    /// Says what this rank does and looks at the clock; false when there is nothing left to watch.
    fn beat(self: &Arc<Self>) -> bool {
        let now = self.clock.tick();
        let state = lock(&self.state);
        if state.closed {
            return false;
        }
        self.tell_activity(&state);
        let silence = now.saturating_sub(state.heard);
        drop(state);
        if silence > self.config.rank_timeout {
            self.lost(&silent(silence), SILENT_HINT);
        }
        true
    }

    /// Says at once what this rank does.
    pub(super) fn tell(&self) {
        self.tell_activity(&lock(&self.state));
    }

    fn tell_activity(&self, state: &LinkState) {
        let snapshot = state.activity.snapshot(self.clock.now());
        self.outbox.tell(&FromRank::Beat(snapshot));
    }

    /// The server, and so rank 0, is gone.
    fn lost(self: &Arc<Self>, what: &str, hint: &str) {
        let now = self.clock.now();
        let mut state = lock(&self.state);
        if state.left {
            state.goodbye = true;
        } else if !state.closed {
            let age = now.saturating_sub(state.heard);
            let message = format!(
                "rank 0 on host {} {what}\n  its last operation: {}\n{hint}",
                self.host_of_zero,
                state.zero.describe(age)
            );
            let failure = Failure {
                kind: FailureKind::Died,
                rank: Some(0),
                message,
            };
            self.end(&mut state, failure);
        }
        self.changed.notify_all();
    }

    /// The run ends for this reason, of which this rank hears now.
    fn end(self: &Arc<Self>, state: &mut LinkState, failure: Failure) {
        if state.failure.is_some() {
            return;
        }
        self.outbox.tell(&FromRank::Noted);
        let ControlConfig { rank, host, .. } = &self.config;
        let text = format!("rank {rank} on host {host}{STOPS}{}\n", failure.message);
        let all_told_to_end = failure.kind == FailureKind::Terminated
            && state.failed == Some(FailureKind::Terminated);
        let own = failure.rank == Some(*rank) || failure.is_of_all();
        state.failure = Some(failure);
        if own || all_told_to_end {
            state.printed = true;
            return;
        }
        let link = self.clone();
        failure::end(text, self.config.ends_process, move || {
            lock(&link.state).printed = true;
            link.changed.notify_all();
        });
    }
}
