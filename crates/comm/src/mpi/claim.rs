//! A rank's claim to the result of an operation: what the thread that computes and MPI's thread share.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Tensor;

use super::heard::Heard;
use crate::Error;
use crate::local::{host, report};
use crate::pending::Work;

/// A wait looks at the clock at least this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// A started operation, shared by who waits for it and who does it.
pub(super) struct Claim<T> {
    /// This rank's number in the world.
    pub world_rank: usize,
    /// What it called, where.
    pub call: String,
    deadline: Duration,
    heard: Arc<Heard>,
    /// What the operation reads, as long as it does.
    input: Mutex<Option<Tensor>>,
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    outcome: Option<Result<T, Error>>,
    is_over: bool,
    /// The world ranks that have not arrived.
    missing: Vec<usize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Claim<T> {
    /// A claim of the rank that `heard` belongs to.
    pub fn new(
        (world_rank, call): (usize, String),
        (deadline, heard): (Duration, Arc<Heard>),
        input: Option<Tensor>,
    ) -> Arc<Self> {
        Arc::new(Self {
            world_rank,
            call,
            deadline,
            heard,
            input: Mutex::new(input),
            state: Mutex::new(State {
                outcome: None,
                is_over: false,
                missing: Vec::new(),
            }),
            changed: Condvar::new(),
        })
    }

    /// Calls `read` with the input, which nobody gives up meanwhile.
    pub fn read_input<R>(
        &self,
        read: impl FnOnce(&Tensor) -> Result<R, Error>,
    ) -> Result<R, Error> {
        match &*lock(&self.input) {
            Some(input) => read(input),
            None => Err(Error::Backend(format!(
                "{}: its input has been given up already",
                self.call
            ))),
        }
    }

    /// The input is needed no more.
    pub fn drop_input(&self) {
        let input = lock(&self.input).take();
        // Outside of the lock: the last owner frees the memory.
        drop(input);
    }

    /// Notes which world ranks have not arrived.
    pub fn set_missing(&self, missing: Vec<usize>) {
        lock(&self.state).missing = missing;
    }

    /// Sets the result and wakes who waits. Only the first result counts.
    pub fn complete(&self, outcome: Result<T, Error>) {
        self.drop_input();
        let mut state = lock(&self.state);
        if !state.is_over {
            state.is_over = true;
            state.outcome = Some(outcome);
            self.changed.notify_all();
        }
    }

    fn wait(&self) -> Result<T, Error> {
        let mut waited = Duration::ZERO;
        let mut state = lock(&self.state);
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            let rest = self.deadline.saturating_sub(waited);
            if rest.is_zero() {
                return Err(Error::Deadline {
                    waiting: self.world_rank,
                    call: self.call.clone(),
                    secs: self.deadline.as_secs_f64(),
                    missing: report::rank_list(&state.missing),
                    report: self.heard.report(),
                });
            }
            // Each sleep counts as no longer than it was meant to be: the time that a process is stopped (Ctrl-Z) is no
            // time that a rank was late.
            let sleep = rest.min(LONGEST_SLEEP);
            let asleep = Instant::now();
            (state, _) = self
                .changed
                .wait_timeout(state, sleep)
                .unwrap_or_else(PoisonError::into_inner);
            waited += asleep.elapsed().min(sleep);
        }
    }

    /// Replaces the input by a copy that nobody else can write to. Returns whether the original is read no more.
    fn release_input(&self) -> bool {
        let mut input = lock(&self.input);
        let Some(xs) = &*input else {
            return true;
        };
        match host::copy(xs) {
            Ok(copy) => {
                *input = Some(copy);
                true
            }
            Err(_) => false,
        }
    }
}

/// The end of a claim that waits.
pub(super) struct Ticket<T>(pub Arc<Claim<T>>);

impl<T: Send> Work<T> for Ticket<T> {
    fn wait(self: Box<Self>) -> candle_core::Result<T> {
        Ok(self.0.wait()?)
    }

    fn abandon(self: Box<Self>) {
        // Without memory for a copy, the end of the operation.
        if !self.0.release_input()
            && let Err(error) = self.0.wait()
        {
            tracing::warn!("an operation whose result was dropped failed: {error}");
        }
    }
}
