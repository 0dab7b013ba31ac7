//! An operation in flight: what the thread that computes and MPI's thread share.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Tensor;

use super::context::LastCalls;
use crate::Error;
use crate::deadline::Deadline;
use crate::element::{self, Element};
use crate::error::rank_list;
use crate::pending::Work;

/// A started operation, shared by who waits for it and who does it.
pub(super) struct InFlight {
    /// This rank's number in the world.
    pub world_rank: usize,
    /// What it called, where.
    pub call: String,
    deadline: Duration,
    last_calls: Arc<LastCalls>,
    tensors: Mutex<Tensors>,
    state: Mutex<State>,
    changed: Condvar,
}

/// The caller's tensors.
#[derive(Default)]
pub(super) struct Tensors {
    /// What the operation reads, as long as it does.
    pub input: Option<Tensor>,
    /// Where its result goes, unless that is new or given up.
    pub place: Option<Tensor>,
}

struct State {
    outcome: Option<Result<Vec<Tensor>, Error>>,
    is_over: bool,
    /// The world ranks that have not arrived.
    missing: Vec<usize>,
    completed: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl InFlight {
    /// An operation of the rank that `last_calls` belongs to.
    pub fn new(
        (world_rank, call): (usize, String),
        (deadline, last_calls): (Duration, Arc<LastCalls>),
        tensors: Tensors,
    ) -> Arc<Self> {
        Arc::new(Self {
            world_rank,
            call,
            deadline,
            last_calls,
            tensors: Mutex::new(tensors),
            state: Mutex::new(State {
                outcome: None,
                is_over: false,
                missing: Vec::new(),
                completed: None,
            }),
            changed: Condvar::new(),
        })
    }

    /// What `read` makes of `len` elements of the input, from element `start` on, which nobody gives up meanwhile.
    pub fn read<E: Element, R>(
        &self,
        start: usize,
        len: usize,
        read: impl FnOnce(&[E]) -> R,
    ) -> Result<R, Error> {
        let error = |why: &str| Error::Backend(format!("{}: its input: {why}", self.call));
        match &lock(&self.tensors).input {
            Some(xs) => {
                element::read(xs, (start, len), read).map_err(|why| error(&crate::message_of(&why)))
            }
            None => Err(error("it has been given up already")),
        }
    }

    /// Whether the result goes to a tensor that the caller gave.
    pub fn is_in_place(&self) -> bool {
        lock(&self.tensors).place.is_some()
    }

    /// Writes elements of the result, from element `start` on, to their place, if nobody has given it up.
    pub fn write<E: Element>(&self, start: usize, values: &[E]) -> Result<(), Error> {
        match &lock(&self.tensors).place {
            Some(place) => element::write(place, start, values).map_err(Error::of_backend),
            None => Ok(()),
        }
    }

    /// The place, with the result in it.
    pub fn place(&self) -> Option<Tensor> {
        lock(&self.tensors).place.clone()
    }

    /// An error unless as many bytes came as should have.
    pub fn check_size(&self, from: usize, got: usize, expected: usize) -> Result<(), Error> {
        if got == expected {
            return Ok(());
        }
        Err(Error::Backend(format!(
            "{}: rank {from} of the group sent {got} bytes, expected {expected}\n\
             hint: all ranks must run the same version of the program",
            self.call
        )))
    }

    /// The input is needed no more.
    pub fn drop_input(&self) {
        let input = lock(&self.tensors).input.take();
        // Outside of the lock: the last owner frees the memory.
        drop(input);
    }

    /// Notes which world ranks have not arrived.
    pub fn set_missing(&self, missing: Vec<usize>) {
        lock(&self.state).missing = missing;
    }

    /// Sets the result and wakes who waits. Only the first result counts.
    pub fn complete(&self, outcome: Result<Vec<Tensor>, Error>) {
        self.drop_input();
        let mut state = lock(&self.state);
        if !state.is_over {
            state.is_over = true;
            state.completed = Some(Instant::now());
            state.outcome = Some(outcome);
            self.changed.notify_all();
        }
    }

    fn wait(&self) -> Result<Vec<Tensor>, Error> {
        let mut deadline = Deadline::new(self.deadline);
        let mut state = lock(&self.state);
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            if deadline.is_over() {
                return Err(Error::Deadline {
                    waiting: self.world_rank,
                    call: self.call.clone(),
                    secs: self.deadline.as_secs_f64(),
                    missing: rank_list(&state.missing),
                    report: self.last_calls.report(),
                });
            }
            state = deadline.wait(&self.changed, state);
        }
    }

    /// Gives up the place, and replaces the input by a copy that nobody else can write to. Returns whether the originals are
    /// read and written no more.
    fn release_tensors(&self) -> bool {
        let mut tensors = lock(&self.tensors);
        let copy = tensors.input.as_ref().map(Tensor::force_contiguous);
        let Ok(input) = copy.transpose() else {
            return false;
        };
        *tensors = Tensors { input, place: None };
        true
    }
}

impl Work for Arc<InFlight> {
    fn completed(&self) -> Option<Instant> {
        lock(&self.state).completed
    }

    fn wait(self: Box<Self>) -> candle_core::Result<Vec<Tensor>> {
        Ok(InFlight::wait(&self)?)
    }

    fn abandon(self: Box<Self>) {
        // Without memory for a copy, the end of the operation.
        if !(**self).release_tensors()
            && let Err(error) = InFlight::wait(&self)
        {
            tracing::warn!("an operation whose result was dropped failed: {error}");
        }
    }
}
