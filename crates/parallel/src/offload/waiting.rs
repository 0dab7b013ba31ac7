//! Activations that wait for a later pass away from the device: inputs of blocks for their backward pass, and what a stage gave for the next
//! one of its rank.
//!
//! ```text
//! forward    .. gives 1             .. gives 2             .. gives 3
//! thread     writes 0               writes 1               writes 2
//! backward   .. uses 3              .. uses 2              .. uses 1
//! thread                            reads 1                reads 0
//! ```
//! The last one that was given is not written before another one is: what is used at once never leaves.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use super::config::OffloadPlace;
use super::store::{Fetched, Kept, OffloadStore};
use crate::memory::{MemoryCategory, MemoryMeter};

/// What waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Activations, on the way of the forward passes and back.
    Activations,
    /// Gradients of activations.
    Gradients,
}

/// A tensor for a later pass.
pub(crate) enum Stored {
    /// On the device.
    Here(Tensor),
    Away(Waiting),
}

impl Stored {
    /// The tensor, on the device.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn get(&self) -> Result<Tensor> {
        match self {
            Self::Here(xs) => Ok(xs.clone()),
            Self::Away(waiting) => waiting.get(),
        }
    }
}

/// The tensors of one rank that wait.
pub(crate) struct WaitingStore {
    store: OffloadStore,
    meter: MemoryMeter,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Items that nothing is in, by the length and the type of what fits.
    free: HashMap<(usize, DType), Vec<usize>>,
    lanes: [InLane; 2],
    /// Number of the next one.
    next: u64,
}

#[derive(Default)]
struct InLane {
    /// Their items by number, in the order in which they came.
    waiting: BTreeMap<u64, usize>,
    /// The last one that came, by its number: on the device.
    newest: Option<(u64, Tensor)>,
    /// The last one that was used.
    used: Option<u64>,
}

/// A tensor that waits; what it takes is free when this is dropped.
pub(crate) struct Waiting {
    of: Arc<WaitingStore>,
    lane: Lane,
    number: u64,
    item: usize,
    shape: Shape,
    dtype: DType,
}

impl WaitingStore {
    /// Room at `place`, which grows; `None` if that is the device.
    ///
    /// # Errors
    /// A folder in which no file can be made.
    pub fn new(
        place: OffloadPlace<'_>,
        device: &Device,
        meter: &MemoryMeter,
    ) -> Result<Option<Arc<Self>>> {
        let kept = Kept {
            what: "activations",
            category: MemoryCategory::Activations,
            items: Vec::new(),
        };
        let store = OffloadStore::new(place, kept, device, meter, |_| Ok(Vec::new()))?;
        let waiting = |store| Self {
            store,
            meter: meter.clone(),
            state: Mutex::default(),
        };
        Ok(store.map(waiting).map(Arc::new))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a tensor until it is used; what are no floats stays where it is.
    ///
    /// # Errors
    /// Memory or space that is missing, and a file that cannot be written.
    pub fn put(self: &Arc<Self>, lane: Lane, xs: Tensor) -> Result<Stored> {
        let (len, dtype) = (xs.elem_count(), xs.dtype());
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) || len == 0 {
            return Ok(Stored::Here(xs));
        }
        let mut state = self.state();
        let free = state.free.get_mut(&(len, dtype)).and_then(Vec::pop);
        let item = match free {
            Some(item) => item,
            None => self.store.add(vec![(len, dtype)])?,
        };
        let number = state.next;
        state.next += 1;
        let in_lane = &mut state.lanes[lane as usize];
        in_lane.waiting.insert(number, item);
        let flat = xs.detach().flatten_all()?.contiguous()?;
        if let Some((older, flat)) = in_lane.newest.replace((number, flat))
            && let Some(&item) = in_lane.waiting.get(&older)
        {
            let older = Fetched {
                tensors: vec![flat],
                held: self.meter.hold(MemoryCategory::Activations, 0),
            };
            self.store.store(item, older)?;
        }
        Ok(Stored::Away(Waiting {
            of: Arc::clone(self),
            lane,
            number,
            item,
            shape: xs.shape().clone(),
            dtype,
        }))
    }

    /// Waits until what was put is written.
    pub fn finish(&self) -> Result<()> {
        self.store.finish()
    }
}

impl InLane {
    /// The item that is used after this one, if tensors are used in the order of the last two uses, or backwards at first.
    fn next_after(&mut self, number: u64) -> Option<usize> {
        let rises = self.used.is_some_and(|used| used < number);
        self.used = Some(number);
        let (next, item) = match rises {
            true => self.waiting.range(number + 1..).next(),
            false => self.waiting.range(..number).next_back(),
        }?;
        let newest = self.newest.as_ref().map(|(newest, _)| newest);
        (newest != Some(next)).then_some(*item)
    }
}

impl Waiting {
    fn get(&self) -> Result<Tensor> {
        let mut state = self.of.state();
        let in_lane = &mut state.lanes[self.lane as usize];
        let next = in_lane.next_after(self.number);
        let newest = in_lane.newest.as_ref();
        let flat = match newest.filter(|(newest, _)| *newest == self.number) {
            Some((_, flat)) => flat.clone(),
            None => match self.of.store.fetch(self.item)?.tensors.pop() {
                Some(flat) => flat,
                None => bail!("an activation came back as no tensor"),
            },
        };
        if let Some(next) = next {
            self.of.store.start_fetch(next)?;
        }
        flat.reshape(&self.shape)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.of.state();
        let in_lane = &mut state.lanes[self.lane as usize];
        in_lane.waiting.remove(&self.number);
        in_lane.newest.take_if(|(newest, _)| *newest == self.number);
        // A file that cannot be read says so to whoever asks it next.
        let _ = self.of.store.forget(self.item);
        let of_kind = (self.shape.elem_count(), self.dtype);
        state.free.entry(of_kind).or_default().push(self.item);
    }
}
