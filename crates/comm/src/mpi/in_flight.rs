//! An operation in flight: what the thread that computes and MPI's thread share.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_core::{Device, Tensor};

use super::Result;
use super::context::Shared;
use crate::Error;
use crate::deadline::Deadline;
use crate::error::rank_list;
use crate::memory::bytes;
use crate::operation::call::Call;
use crate::operation::pending::Work;
use crate::reduction::element::{self, Element, with_element};

/// A started operation, shared by who waits for it and who does it.
pub(super) struct MpiInFlight {
    pub shared: Arc<Shared>,
    /// What this rank called, where.
    pub call: Call,
    tensors: Mutex<Tensors>,
    state: Mutex<InFlightState>,
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

#[derive(Default)]
struct InFlightState {
    outcome: Option<Result<Vec<Tensor>>>,
    /// The world ranks that have not arrived.
    missing: Vec<usize>,
    /// Of messages, in the order in which they were asked for: the tensor, or the world rank that it is to come from.
    messages: Vec<std::result::Result<Tensor, usize>>,
    completed: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MpiInFlight {
    /// An operation that this rank has called.
    pub fn new(shared: Arc<Shared>, call: Call, tensors: Tensors) -> Arc<Self> {
        Arc::new(Self {
            shared,
            call,
            tensors: Mutex::new(tensors),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// What `read` makes of `len` elements of the input, from element `start` on, which nobody gives up meanwhile.
    pub fn read<E: Element, R>(
        &self,
        start: usize,
        len: usize,
        read: impl FnOnce(&[E]) -> R,
    ) -> Result<R> {
        let got = match &lock(&self.tensors).input {
            Some(xs) => element::read(xs, (start, len), read).map_err(Error::from),
            None => Err(Error::Backend("it has been given up already".into())),
        };
        got.map_err(|why| Error::Backend(format!("{}: its input: {why}", self.call)))
    }

    /// The caller's tensor for the result, unless it has given none, or given it up.
    pub fn place(&self) -> Option<Tensor> {
        lock(&self.tensors).place.clone()
    }

    /// Writes a part of the result, from element `start` on, to the caller's tensor, if it has given one.
    pub fn write(&self, start: usize, values: &[u8]) -> Result<()> {
        fn typed<T: Element>(place: &Tensor, start: usize, values: &[u8]) -> Result<()> {
            Ok(element::write::<T>(place, start, bytes::elements(values))?)
        }
        match &lock(&self.tensors).place {
            Some(place) => with_element!(place.dtype(), typed(place, start, values)),
            None => Ok(()),
        }
    }

    /// The whole result, in the caller's tensor or a new one.
    pub fn result<T: Element>(&self, values: Vec<T>, dims: &[usize]) -> Result<Vec<Tensor>> {
        let xs = match &lock(&self.tensors).place {
            Some(place) => {
                element::write(place, 0, &values)?;
                place.clone()
            }
            None => Tensor::from_vec(values, dims, &Device::Cpu)?,
        };
        Ok(vec![xs])
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

    /// The result will be messages from these world ranks; it is complete if there are none.
    pub fn await_messages(&self, sources: Vec<usize>) {
        lock(&self.state).messages = sources.into_iter().map(Err).collect();
        self.look_for_messages();
    }

    /// Takes in the message number `index`; the last one completes the result.
    pub fn arrived(&self, index: usize, xs: Tensor) {
        lock(&self.state).messages[index] = Ok(xs);
        self.look_for_messages();
    }

    fn look_for_messages(&self) {
        let mut state = lock(&self.state);
        let missing = state.messages.iter().filter_map(|got| got.as_ref().err());
        state.missing = missing.copied().collect();
        if state.missing.is_empty() {
            let messages = std::mem::take(&mut state.messages);
            drop(state);
            self.complete(Ok(messages.into_iter().flatten().collect()));
        }
    }

    /// Sets the result and wakes who waits. Only the first result counts.
    pub fn complete(&self, outcome: Result<Vec<Tensor>>) {
        self.drop_input();
        let mut state = lock(&self.state);
        if state.completed.is_none() {
            state.completed = Some(Instant::now());
            state.outcome = Some(outcome);
            self.changed.notify_all();
        }
    }

    fn wait(&self) -> Result<Vec<Tensor>> {
        let mut deadline = Deadline::new(self.shared.deadline);
        let mut state = lock(&self.state);
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            if deadline.is_over() {
                return Err(Error::Deadline {
                    waiting: self.shared.world_rank,
                    call: self.call.to_string(),
                    secs: self.shared.deadline.as_secs_f64(),
                    missing: rank_list(&state.missing),
                    report: self.shared.report(),
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

impl Work for Arc<MpiInFlight> {
    fn completed(&self) -> Option<Instant> {
        lock(&self.state).completed
    }

    fn wait(self: Box<Self>) -> candle_core::Result<Vec<Tensor>> {
        Ok(MpiInFlight::wait(&self)?)
    }

    fn abandon(self: Box<Self>) {
        // Without memory for a copy, the end of the operation.
        if !(**self).release_tensors()
            && let Err(error) = MpiInFlight::wait(&self)
        {
            tracing::warn!("an operation whose result was dropped failed: {error}");
        }
    }
}
