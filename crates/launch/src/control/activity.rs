//! What a rank is doing: its operations in flight, how far it is in each group, and its step.

use std::collections::BTreeMap;
use std::thread::ThreadId;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Operation;

/// What this rank is doing. Times are those of the run clock.
#[derive(Default)]
pub(super) struct Activity {
    pub step: Option<(u64, String)>,
    /// Operations in flight, in the order in which they began.
    open: Vec<OpenOperation>,
    /// By group id: how many of its numbered operations have begun.
    begun: BTreeMap<String, u64>,
    /// The operation that began last, once it has ended, and when it did.
    ended: Option<(Operation, Duration)>,
    next_id: u64,
    /// The thread that begins operations and waits for them.
    thread: Option<ThreadId>,
    /// Whether several threads do: what one of them waits for another may bring about.
    has_threads: bool,
}

struct OpenOperation {
    id: u64,
    operation: Operation,
    begun: Duration,
    state: OperationState,
}

/// How the rank goes on while an operation is in flight.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationState {
    /// Since then the rank cannot go on before the operation is complete.
    Blocked(Duration),
    /// Since then its GPU cannot; the rank may go on.
    GpuBlocked(Duration),
    /// The rank goes on; its device has not come to the operation.
    Queued,
    /// The rank goes on.
    Started,
}

impl Activity {
    /// An operation begins, and the rank is blocked in it. Returns its id, and whether it is the first of its group.
    pub(super) fn begin(&mut self, operation: Operation, now: Duration) -> (u64, bool) {
        let id = self.next_id;
        self.next_id += 1;
        self.note_thread();
        let group = &operation.group.id;
        let is_new = !self.begun.contains_key(group);
        let begun = self.begun.entry(group.clone()).or_default();
        if let Some(seq) = operation.seq {
            *begun = (*begun).max(seq + 1);
        }
        self.open.push(OpenOperation {
            id,
            operation,
            begun: now,
            state: OperationState::Blocked(now),
        });
        (id, is_new)
    }

    /// Notes that this thread begins operations or waits for them.
    fn note_thread(&mut self) {
        let thread = std::thread::current().id();
        self.has_threads |= *self.thread.get_or_insert(thread) != thread;
    }

    pub(super) fn set(&mut self, id: u64, state: OperationState) {
        if matches!(state, OperationState::Blocked(_)) {
            self.note_thread();
        }
        if let Some(open) = self.open.iter_mut().find(|open| open.id == id) {
            open.state = state;
        }
    }

    pub(super) fn end(&mut self, id: u64, now: Duration) {
        let Some(index) = self.open.iter().position(|open| open.id == id) else {
            return;
        };
        let open = self.open.remove(index);
        if id + 1 == self.next_id {
            self.ended = Some((open.operation, now));
        }
    }

    /// What to tell the other ranks.
    pub(super) fn snapshot(&self, now: Duration) -> Snapshot {
        let blocked = self.open.iter().filter_map(|open| match open.state {
            OperationState::Blocked(since) | OperationState::GpuBlocked(since) => {
                Some((open, since))
            }
            OperationState::Queued | OperationState::Started => None,
        });
        let blocked = blocked.min_by_key(|(_, since)| *since);
        let newest = (self.open.last()).filter(|open| open.id + 1 == self.next_id);
        let secs = |since: Duration| now.saturating_sub(since).as_secs_f64();
        let doing = match (blocked, newest, &self.ended) {
            (Some((open, since)), ..) => {
                let place = format!("in {}", open.operation);
                Some(("for".to_string(), secs(since), place))
            }
            (None, Some(open), _) => {
                let (called, state) = match open.state {
                    OperationState::Queued => ("called", "ago, its GPU has not come to it"),
                    _ => ("started", "ago, not waited for yet"),
                };
                let called = format!("{called} {}", open.operation);
                Some((called, secs(open.begun), state.to_string()))
            }
            (None, None, Some((operation, ended))) => {
                let finished = format!("finished {operation}");
                Some((finished, secs(*ended), "ago, nothing since".to_string()))
            }
            (None, None, None) => None,
        };
        let shown = blocked.map(|(open, _)| open).or(newest);
        let shown = shown.map(|open| open.id);
        let mut others = self.open.iter().filter(|open| Some(open.id) != shown);
        let mut besides = String::new();
        if let Some(oldest) = others.next() {
            let num_others = 1 + others.count();
            besides += &format!(
                "; {num_others} more in flight, the oldest {}",
                oldest.operation
            );
        }
        if let Some((step, phase)) = &self.step {
            besides += &format!("; step {step}, {phase}");
        }
        Snapshot {
            doing,
            besides,
            blocked: blocked.map(|(open, since)| BlockedIn {
                group: open.operation.group.id.clone(),
                seq: open.operation.seq,
                secs: secs(since),
                is_all: !self.has_threads && matches!(open.state, OperationState::Blocked(_)),
            }),
            groups: self.progress(),
        }
    }

    fn progress(&self) -> BTreeMap<String, GroupProgress> {
        let progress = self.begun.iter().map(|(id, begun)| {
            let of_group = self
                .open
                .iter()
                .filter(|open| open.operation.group.id == *id);
            let first = |is_queued: bool| {
                let open = of_group
                    .clone()
                    .filter(|open| !is_queued || open.state == OperationState::Queued);
                let first = open.filter_map(|open| open.operation.seq).min();
                first.unwrap_or(*begun)
            };
            let progress = GroupProgress {
                begun: *begun,
                reached: first(true),
                completed: first(false),
            };
            (id.clone(), progress)
        });
        progress.collect()
    }
}

/// What a rank was doing when it last said so.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Snapshot {
    /// Its last operation, as words before and after the seconds since when.
    doing: Option<(String, f64, String)>,
    /// What else is in flight, and its step.
    besides: String,
    pub blocked: Option<BlockedIn>,
    /// By group id.
    pub groups: BTreeMap<String, GroupProgress>,
}

/// The operation in which a rank has been blocked for the longest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct BlockedIn {
    pub group: String,
    pub seq: Option<u64>,
    pub secs: f64,
    /// Whether the rank does nothing else: its one thread that begins operations waits for this one.
    pub is_all: bool,
}

/// How far a rank is in a group: the number of the first operation that has not begun, that its device has not come to, that is
/// not complete.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct GroupProgress {
    pub begun: u64,
    pub reached: u64,
    pub completed: u64,
}

impl Snapshot {
    /// In words, `age` after it was taken.
    pub(super) fn describe(&self, age: Duration) -> String {
        let doing = match &self.doing {
            None => "no operation yet".to_string(),
            Some((before, secs, after)) => {
                format!("{before} {:.1} s {after}", secs + age.as_secs_f64())
            }
        };
        doing + &self.besides
    }
}
