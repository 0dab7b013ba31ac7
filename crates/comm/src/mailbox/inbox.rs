//! What has come for a rank, in the order in which it came.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Departure, Mail, MailboxConfig, Received};
use crate::deadline::Deadline;

/// What has come for a rank. Of each sender it takes messages until these have `limit` bytes; the next one waits, with its sender,
/// until there is room. So it never holds more of a sender than the limit and one message.
pub(super) struct Inbox {
    limit: usize,
    /// Bytes that a tensor from another process may have.
    pub largest_tensor: AtomicUsize,
    state: Mutex<Inbound>,
    changed: Condvar,
}

struct Inbound {
    mails: VecDeque<Mail>,
    /// By rank.
    senders: Vec<Sender>,
    /// The first rank of which it was heard that it failed, and those after it.
    failed: Vec<usize>,
    /// The owner has left.
    is_closed: bool,
}

#[derive(Clone, Default)]
struct Sender {
    /// What its mails take.
    num_bytes: usize,
    departure: Option<Departure>,
    /// Whether who receives from any rank has heard of the departure.
    is_told: bool,
    /// Whether it knows that the owner leaves.
    is_noted: bool,
}

impl Inbox {
    pub fn new(world_size: usize, config: &MailboxConfig) -> Self {
        let state = Inbound {
            mails: VecDeque::new(),
            senders: vec![Sender::default(); world_size],
            failed: Vec::new(),
            is_closed: false,
        };
        Self {
            limit: config.inbox_bytes,
            largest_tensor: AtomicUsize::new(config.largest_tensor_bytes),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Waits until the inbox takes another message of rank `from`; false if the owner leaves before, or the time is over.
    pub fn wait_for_room(&self, from: usize, limit: Duration) -> bool {
        let room = self.wait_for(limit, |state| {
            let is_there = state.senders[from].num_bytes < self.limit;
            (state.is_closed || is_there).then_some(!state.is_closed)
        });
        room.unwrap_or(false)
    }

    /// Adds a message, unless the owner has left.
    pub fn put(&self, mail: Mail) {
        self.change(|state| {
            if !state.is_closed {
                state.senders[mail.from].num_bytes += mail.num_bytes();
                state.mails.push_back(mail);
            }
        });
    }

    /// The first message from this rank, or any, with this tag, or any; or a departure for which none will come. `None` if the time is over.
    pub fn take(&self, from: Option<usize>, tag: Option<u64>, limit: Duration) -> Option<Received> {
        let found = self.wait_for(limit, |state| state.find(from, tag));
        self.changed.notify_all();
        found
    }

    /// Notes that a rank sends nothing any more. The first word about it counts.
    pub fn note_departure(&self, departure: Departure) {
        self.change(|state| {
            let sender = &mut state.senders[departure.rank];
            sender.is_noted = true;
            if sender.departure.is_none() && departure.why.is_some() {
                state.failed.push(departure.rank);
            }
            sender.departure.get_or_insert(departure);
        });
    }

    pub fn departure(&self, rank: usize) -> Option<Departure> {
        self.lock().senders.get(rank)?.departure.clone()
    }

    /// The end of the first of these ranks that failed.
    pub fn first_failed(&self, among: Range<usize>) -> Option<Departure> {
        let state = self.lock();
        let first = state.failed.iter().find(|rank| among.contains(rank))?;
        state.senders[*first].departure.clone()
    }

    /// The number of ranks that have gone, the owner not among them.
    pub fn num_departed(&self) -> usize {
        let state = self.lock();
        let has_departed = |sender: &&Sender| sender.departure.is_some();
        state.senders.iter().filter(has_departed).count()
    }

    /// Notes that a rank knows that the owner leaves.
    pub fn note_farewell(&self, rank: usize) {
        self.change(|state| state.senders[rank].is_noted = true);
    }

    /// Waits until these ranks know that the owner leaves, or are gone.
    pub fn wait_for_farewells(&self, ranks: &[usize], limit: Duration) {
        self.wait_for(limit, |state| {
            let is_noted = |rank: &usize| state.senders[*rank].is_noted;
            ranks.iter().all(is_noted).then_some(())
        });
    }

    /// Throws everything away, now and from now on: the owner leaves.
    pub fn close(&self) {
        self.change(|state| {
            state.is_closed = true;
            state.mails.clear();
            (state.senders.iter_mut()).for_each(|sender| sender.num_bytes = 0);
        });
    }

    /// Waits for what comes, at most so long.
    fn wait_for<T>(
        &self,
        limit: Duration,
        mut come: impl FnMut(&mut Inbound) -> Option<T>,
    ) -> Option<T> {
        let mut deadline = Deadline::new(limit);
        let mut state = self.lock();
        loop {
            let here = come(&mut state);
            if here.is_some() || deadline.is_over() {
                return here;
            }
            state = deadline.wait(&self.changed, state);
        }
    }

    fn change(&self, change: impl FnOnce(&mut Inbound)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// No code panics while it holds the lock, so a poisoned one still guards a sound state.
    fn lock(&self) -> MutexGuard<'_, Inbound> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbound {
    fn find(&mut self, from: Option<usize>, tag: Option<u64>) -> Option<Received> {
        let is_wanted = |mail: &Mail| {
            from.is_none_or(|from| mail.from == from) && tag.is_none_or(|tag| mail.tag == tag)
        };
        let place = self.mails.iter().position(is_wanted);
        if let Some(mail) = place.and_then(|place| self.mails.remove(place)) {
            self.senders[mail.from].num_bytes -= mail.num_bytes();
            return Some(Received::Mail(mail));
        }
        let gone = match from {
            Some(from) => self.senders[from].departure.as_ref()?,
            None => {
                let is_new = |sender: &&mut Sender| sender.departure.is_some() && !sender.is_told;
                let sender = self.senders.iter_mut().find(is_new)?;
                sender.is_told = true;
                sender.departure.as_ref()?
            }
        };
        Some(Received::Left(gone.clone()))
    }
}
