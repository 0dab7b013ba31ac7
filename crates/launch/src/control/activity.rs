//! What a rank is doing: its operations in flight and its step.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Operation;

/// What this rank is doing. Times are those of the run clock.
#[derive(Default)]
pub(super) struct Activity {
    step: Option<(u64, &'static str)>,
    open: Vec<Open>,
    /// The operation that began last, once it has ended, and when it did.
    ended: Option<(Operation, Duration)>,
    next_id: u64,
}

struct Open {
    id: u64,
    operation: Operation,
    begun: Duration,
    /// Since when the rank cannot go on before the operation does.
    blocked: Option<Duration>,
}

impl Activity {
    pub(super) fn set_step(&mut self, step: u64, phase: &'static str) {
        self.step = Some((step, phase));
    }

    /// An operation begins, and the rank is blocked in it.
    pub(super) fn begin(&mut self, operation: Operation, now: Duration) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let blocked = Some(now);
        self.open.push(Open {
            id,
            operation,
            begun: now,
            blocked,
        });
        id
    }

    /// The rank is blocked in the operation from now on, or no longer.
    pub(super) fn set_blocked(&mut self, id: u64, blocked: Option<Duration>) {
        if let Some(open) = self.open.iter_mut().find(|open| open.id == id) {
            open.blocked = blocked;
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
        let blocked = self.open.iter().filter_map(|open| {
            let since = open.blocked?;
            Some((&open.operation, now.saturating_sub(since)))
        });
        blocked.max_by_key(|(_, time)| *time)
    }

    /// What to tell the other ranks.
    pub(super) fn snapshot(&self, now: Duration) -> Snapshot {
        let (operation, state, time) = match (self.longest_block(now), self.open.last()) {
            (Some((operation, time)), _) => (Some(operation), State::Waits, time),
            (None, Some(open)) if open.id + 1 == self.next_id => (
                Some(&open.operation),
                State::Started,
                now.saturating_sub(open.begun),
            ),
            _ => match &self.ended {
                Some((operation, ended)) => {
                    (Some(operation), State::Finished, now.saturating_sub(*ended))
                }
                None => (None, State::Finished, Duration::ZERO),
            },
        };
        Snapshot {
            step: self.step.map(|(step, phase)| (step, phase.to_string())),
            operation: operation.map(|operation| LastOperation {
                text: operation.to_string(),
                group: operation.group.id.clone(),
                seq: operation.seq,
                state,
                secs: time.as_secs_f64(),
            }),
        }
    }
}

/// What a rank was doing when it last said so.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Snapshot {
    step: Option<(u64, String)>,
    operation: Option<LastOperation>,
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
    Started,
    Finished,
}

impl Snapshot {
    /// In words, `age` after it was taken.
    pub(super) fn describe(&self, age: Duration) -> String {
        let operation = match &self.operation {
            None => "no operation yet".to_string(),
            Some(last) => {
                let (text, secs) = (&last.text, last.secs + age.as_secs_f64());
                match last.state {
                    State::Waits => format!("for {secs:.1} s in {text}"),
                    State::Started => format!("started {text} {secs:.1} s ago, not waited for yet"),
                    State::Finished => format!("finished {text} {secs:.1} s ago, nothing since"),
                }
            }
        };
        match &self.step {
            Some((step, phase)) => format!("{operation}; step {step}, {phase}"),
            None => operation,
        }
    }

    /// Group and number of the operation that the rank has begun and not ended.
    pub(super) fn in_flight(&self) -> Option<(&str, Option<u64>)> {
        let last = self.operation.as_ref()?;
        (last.state != State::Finished).then_some((last.group.as_str(), last.seq))
    }
}
