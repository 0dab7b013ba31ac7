//! What a rank is doing: its operations in flight, how far it is in each group, and its step.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Operation, RankGroup};

/// What this rank is doing. Times are those of the run clock.
#[derive(Default)]
pub(super) struct Activity {
    step: Option<(u64, &'static str)>,
    /// Operations in flight, in the order in which they began.
    open: Vec<Open>,
    /// By group id: how many of its numbered operations have begun.
    begun: BTreeMap<String, u64>,
    /// The operation that began last, once it has ended, and when it did.
    ended: Option<(Operation, Duration)>,
    next_id: u64,
}

struct Open {
    id: u64,
    operation: Operation,
    begun: Duration,
    /// Since when the rank, or its device, cannot go on before the operation does.
    blocked: Option<Duration>,
    /// The rank's device has not come to it.
    is_queued: bool,
}

impl Activity {
    pub(super) fn set_step(&mut self, step: u64, phase: &'static str) {
        self.step = Some((step, phase));
    }

    /// An operation begins, and the rank is blocked in it. Returns its id, and whether it is the first of its group.
    pub(super) fn begin(&mut self, operation: Operation, now: Duration) -> (u64, bool) {
        let id = self.next_id;
        self.next_id += 1;
        let group = &operation.group.id;
        let is_new = !self.begun.contains_key(group);
        let begun = self.begun.entry(group.clone()).or_default();
        if let Some(seq) = operation.seq {
            *begun = (*begun).max(seq + 1);
        }
        self.open.push(Open {
            id,
            operation,
            begun: now,
            blocked: Some(now),
            is_queued: false,
        });
        (id, is_new)
    }

    /// The rank is blocked in the operation from now on, or no longer.
    pub(super) fn set_blocked(&mut self, id: u64, blocked: Option<Duration>) {
        if let Some(open) = self.open.iter_mut().find(|open| open.id == id) {
            open.blocked = blocked;
            open.is_queued = false;
        }
    }

    /// The operation is behind others on the rank's device.
    pub(super) fn set_queued(&mut self, id: u64) {
        if let Some(open) = self.open.iter_mut().find(|open| open.id == id) {
            open.blocked = None;
            open.is_queued = true;
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

    /// The operation in which the rank has been blocked for the longest, and for how long.
    pub(super) fn longest_block(&self, now: Duration) -> Option<(&Operation, Duration)> {
        let open = self.longest_blocked()?;
        Some((&open.operation, now.saturating_sub(open.blocked?)))
    }

    fn longest_blocked(&self) -> Option<&Open> {
        let blocked = self.open.iter().filter(|open| open.blocked.is_some());
        blocked.min_by_key(|open| open.blocked)
    }

    /// What to tell the other ranks.
    pub(super) fn snapshot(&self, now: Duration) -> Snapshot {
        let newest = (self.open.last()).filter(|open| open.id + 1 == self.next_id);
        let (shown, operation, state, since) = match (self.longest_blocked(), newest, &self.ended) {
            (Some(open), ..) => (
                Some(open.id),
                Some(&open.operation),
                State::Waits,
                open.blocked.unwrap_or(now),
            ),
            (None, Some(open), _) => {
                let state = match open.is_queued {
                    true => State::Queued,
                    false => State::Started,
                };
                (Some(open.id), Some(&open.operation), state, open.begun)
            }
            (None, None, Some((operation, ended))) => {
                (None, Some(operation), State::Finished, *ended)
            }
            (None, None, None) => (None, None, State::Finished, now),
        };
        let mut others = self.open.iter().filter(|open| Some(open.id) != shown);
        let oldest = others.next();
        Snapshot {
            step: self.step.map(|(step, phase)| (step, phase.to_string())),
            operation: operation.map(|operation| LastOperation {
                text: operation.to_string(),
                group: operation.group.id.clone(),
                seq: operation.seq,
                state,
                secs: now.saturating_sub(since).as_secs_f64(),
            }),
            others: oldest.map(|oldest| (1 + others.count(), oldest.operation.to_string())),
            groups: self
                .begun
                .iter()
                .map(|(id, begun)| self.progress(id, *begun))
                .collect(),
        }
    }

    fn progress(&self, id: &str, begun: u64) -> GroupProgress {
        let numbers = |queued_only: bool| {
            let here = self
                .open
                .iter()
                .filter(|open| open.operation.group.id == id);
            let here = here.filter(move |open| open.is_queued || !queued_only);
            here.filter_map(|open| open.operation.seq)
                .min()
                .unwrap_or(begun)
        };
        GroupProgress {
            id: id.to_string(),
            begun,
            reached: numbers(true),
            completed: numbers(false),
        }
    }
}

/// What a rank was doing when it last said so.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Snapshot {
    step: Option<(u64, String)>,
    operation: Option<LastOperation>,
    /// How many more are in flight, and the oldest of them.
    others: Option<(usize, String)>,
    groups: Vec<GroupProgress>,
}

/// How far a rank is in a group: the number of the first operation that has not begun, that its device has not come to, that is
/// not complete.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct GroupProgress {
    id: String,
    pub begun: u64,
    pub reached: u64,
    pub completed: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct LastOperation {
    text: String,
    group: String,
    seq: Option<u64>,
    state: State,
    secs: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum State {
    Waits,
    Queued,
    Started,
    Finished,
}

impl Snapshot {
    /// In words, `age` after it was taken.
    pub(super) fn describe(&self, age: Duration) -> String {
        let mut words = match &self.operation {
            None => "no operation yet".to_string(),
            Some(last) => {
                let (text, secs) = (&last.text, last.secs + age.as_secs_f64());
                match last.state {
                    State::Waits => format!("for {secs:.1} s in {text}"),
                    State::Queued => {
                        format!("called {text} {secs:.1} s ago, its GPU has not come to it")
                    }
                    State::Started => format!("started {text} {secs:.1} s ago, not waited for yet"),
                    State::Finished => format!("finished {text} {secs:.1} s ago, nothing since"),
                }
            }
        };
        if let Some((num_others, oldest)) = &self.others {
            words += &format!("; {num_others} more in flight, the oldest {oldest}");
        }
        if let Some((step, phase)) = &self.step {
            words += &format!("; step {step}, {phase}");
        }
        words
    }

    /// How far the rank is in a group.
    pub(super) fn progress(&self, group: &RankGroup) -> GroupProgress {
        let progress = self.groups.iter().find(|progress| progress.id == group.id);
        progress.cloned().unwrap_or_default()
    }

    /// Id of the group, and number, of the operation in which the rank is blocked.
    pub(super) fn blocked_in(&self) -> Option<(&str, Option<u64>)> {
        let last = self.operation.as_ref()?;
        (last.state == State::Waits).then_some((last.group.as_str(), last.seq))
    }
}
