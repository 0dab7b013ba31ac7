//! What has come for a rank, in the order in which it came.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Departure, Mail, Received};
use crate::deadline::Deadline;

/// What has come for a rank. Of each sender it takes messages until these have `limit` bytes; the next one waits, with its sender,
/// until there is room. So it never holds more of a sender than the limit and one message.
pub(super) struct Inbox {
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    mails: VecDeque<Mail>,
    /// What the mails of each rank take.
    num_bytes: Vec<usize>,
    departures: Vec<Option<Departure>>,
    /// Whether who receives from any rank has heard of the departure.
    is_told: Vec<bool>,
    /// Whether a rank knows that the owner leaves.
    is_noted: Vec<bool>,
    /// The owner has left.
    is_closed: bool,
}

impl Inbox {
    pub fn new((rank, world_size): (usize, usize), limit: usize) -> Self {
        let state = State {
            mails: VecDeque::new(),
            num_bytes: vec![0; world_size],
            departures: vec![None; world_size],
            is_told: (0..world_size).map(|other| other == rank).collect(),
            is_noted: vec![false; world_size],
            is_closed: false,
        };
        Self {
            limit,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Waits until the inbox takes another message of rank `from`; false if the owner leaves before, or the time is over.
    pub fn wait_for_room(&self, from: usize, limit: Duration) -> bool {
        let mut deadline = Deadline::new(limit);
        let mut state = self.lock();
        while !state.is_closed && state.num_bytes[from] >= self.limit && !deadline.is_over() {
            state = deadline.wait(&self.changed, state);
        }
        !state.is_closed && state.num_bytes[from] < self.limit
    }

    /// Adds a message, unless the owner has left.
    pub fn put(&self, mail: Mail) {
        let mut state = self.lock();
        if !state.is_closed {
            state.num_bytes[mail.from] += mail.num_bytes();
            state.mails.push_back(mail);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The first message from this rank, or any, with this tag, or any; or a departure for which none will come. `None` if the time is over.
    pub fn take(&self, from: Option<usize>, tag: Option<u64>, limit: Duration) -> Option<Received> {
        let mut deadline = Deadline::new(limit);
        let mut state = self.lock();
        loop {
            if let Some(found) = state.find(from, tag) {
                drop(state);
                self.changed.notify_all();
                return Some(found);
            }
            if deadline.is_over() {
                return None;
            }
            state = deadline.wait(&self.changed, state);
        }
    }

    /// Notes that a rank sends nothing any more. The first word about it counts.
    pub fn note_departure(&self, departure: Departure) {
        let mut state = self.lock();
        let rank = departure.rank;
        state.is_noted[rank] = true;
        state.departures[rank].get_or_insert(departure);
        drop(state);
        self.changed.notify_all();
    }

    pub fn departure(&self, rank: usize) -> Option<Departure> {
        self.lock().departures[rank].clone()
    }

    /// The number of ranks that have gone, the owner not among them.
    pub fn num_departed(&self) -> usize {
        self.lock().departures.iter().flatten().count()
    }

    /// Notes that a rank knows that the owner leaves.
    pub fn note_farewell(&self, rank: usize) {
        self.lock().is_noted[rank] = true;
        self.changed.notify_all();
    }

    /// Waits until these ranks know that the owner leaves, or are gone.
    pub fn wait_for_farewells(&self, ranks: &[usize], limit: Duration) {
        let mut deadline = Deadline::new(limit);
        let mut state = self.lock();
        while ranks.iter().any(|rank| !state.is_noted[*rank]) && !deadline.is_over() {
            state = deadline.wait(&self.changed, state);
        }
    }

    /// Throws everything away, now and from now on: the owner leaves.
    pub fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.mails.clear();
        state.num_bytes.fill(0);
        drop(state);
        self.changed.notify_all();
    }

    /// The bytes of what is there.
    pub fn num_bytes(&self) -> usize {
        self.lock().num_bytes.iter().sum()
    }

    /// No code panics while it holds the lock, so a poisoned one still guards a sound state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn find(&mut self, from: Option<usize>, tag: Option<u64>) -> Option<Received> {
        let is_wanted = |mail: &Mail| {
            from.is_none_or(|from| mail.from == from) && tag.is_none_or(|tag| mail.tag == tag)
        };
        if let Some(mail) =
            (self.mails.iter().position(is_wanted)).and_then(|place| self.mails.remove(place))
        {
            self.num_bytes[mail.from] -= mail.num_bytes();
            return Some(Received::Mail(mail));
        }
        let gone = match from {
            Some(from) => self.departures[from].as_ref(),
            None => {
                let gone = self.departures.iter().zip(&self.is_told);
                let untold = gone.filter(|(_, is_told)| !**is_told);
                untold
                    .filter_map(|(departure, _)| departure.as_ref())
                    .next()
            }
        }?
        .clone();
        if from.is_none() {
            self.is_told[gone.rank] = true;
        }
        Some(Received::Left(gone))
    }
}
