//! Activations that wait for a later pass away from the device: inputs of blocks for their backward pass, and what a stage gave for the next
//! one of its rank.
//!
//! ```text
//! forward    .. gives 1             .. gives 2             .. gives 3
//! thread     writes 0               writes 1               writes 2
//! backward   .. uses 3              .. uses 2              .. uses 1
//! thread                            reads 1                reads 0
//! ```
//! The last one that was given is not written before another one is: what is used at once never leaves. Nor do those that came while there
//! was [room](crate::Offload::kept_activations) on the device.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use super::config::OffloadPlace;
use super::store::{Fetched, Kept, OffloadStore};
use crate::memory::{MemoryCategory, MemoryMeter};

/// What waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// On the device, in room that is kept for tensors that wait.
    Kept {
        xs: Tensor,
        _room: Room,
    },
    Away(Waiting),
}

impl Stored {
    /// The tensor, on the device.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn get(&self) -> Result<Tensor> {
        match self {
            Self::Here(xs) | Self::Kept { xs, .. } => Ok(xs.clone()),
            Self::Away(waiting) => waiting.get(),
        }
    }
}

/// The tensors of one rank that wait.
pub(crate) struct WaitingStore {
    store: OffloadStore,
    meter: MemoryMeter,
    /// Bytes on the device for those that stay there.
    room: u64,
    state: Mutex<WaitingState>,
}

#[derive(Default)]
struct WaitingState {
    /// Of each type the items that nothing is in, and how many values fit into each.
    free: HashMap<DType, Vec<(usize, usize)>>,
    /// Of each type how many values fit into the largest item.
    largest: HashMap<DType, usize>,
    lanes: [InLane; 2],
    /// Bytes of those that stay on the device.
    kept: u64,
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
    /// How many values fit into the item.
    capacity: usize,
    shape: Shape,
    dtype: DType,
}

/// Room on the device, free again when this is dropped.
pub(crate) struct Room {
    of: Arc<WaitingStore>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut state = self.of.state();
        state.kept = state.kept.saturating_sub(self.bytes);
    }
}

impl WaitingStore {
    /// Space at `place`, which grows, for what has no more of the `room` on the device; `None` if that is where all are.
    ///
    /// # Errors
    /// A folder in which no file can be made.
    pub fn new(
        place: OffloadPlace<'_>,
        room: u64,
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
            room,
            state: Mutex::default(),
        };
        Ok(store.map(waiting).map(Arc::new))
    }

    fn state(&self) -> MutexGuard<'_, WaitingState> {
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
        let bytes = (len * dtype.size_in_bytes()) as u64;
        if bytes <= self.room.saturating_sub(state.kept) {
            state.kept += bytes;
            let of = Arc::clone(self);
            return Ok(Stored::Kept {
                xs: xs.detach(),
                _room: Room { of, bytes },
            });
        }
        let (item, capacity) = self.item(&mut state, len, dtype)?;
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
            capacity,
            shape: xs.shape().clone(),
            dtype,
        }))
    }

    /// An item for so many values, and how many fit into it. Micro-batches may be of any lengths: one that outgrows all items gets one of twice
    /// the largest at least, so that those which are too small never add up to more than the others.
    fn item(&self, state: &mut WaitingState, len: usize, dtype: DType) -> Result<(usize, usize)> {
        let free = state.free.entry(dtype).or_default();
        let fits = (0..free.len()).filter(|&place| free[place].1 >= len);
        let (item, capacity) = match fits.min_by_key(|&place| free[place].1) {
            Some(place) => free.swap_remove(place),
            None => {
                let largest = state.largest.entry(dtype).or_default();
                if *largest < len {
                    *largest = len.max(2 * *largest);
                }
                (self.store.add(vec![(*largest, dtype)])?, *largest)
            }
        };
        self.store.refit(item, &[(len, dtype)])?;
        Ok((item, capacity))
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
        let free = state.free.entry(self.dtype).or_default();
        free.push((self.item, self.capacity));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_any_lengths_come_back_from_room_that_does_not_grow_for_ever() -> Result<()> {
        let (dir, meter) = (tempfile::tempdir()?, MemoryMeter::default());
        let place = OffloadPlace::File(dir.path());
        let store = WaitingStore::new(place, 0, &Device::Cpu, &meter)?.expect("a store");
        let lens = [7, 1, 300, 299, 5, 512];
        for len in lens.into_iter().chain(1..200) {
            let put = |start: usize| {
                let values = (start..start + len).map(|value| value as f32).collect();
                let xs = Tensor::from_vec(values, (1, len), &Device::Cpu)?;
                store.put(Lane::Activations, xs)
            };
            let waiting: Vec<Stored> = (0..4).map(put).collect::<Result<_>>()?;
            for (start, stored) in waiting.iter().enumerate().rev() {
                assert!(matches!(stored, Stored::Away(_)));
                let got = stored.get()?.to_vec2::<f32>()?;
                let want: Vec<f32> = (start..start + len).map(|value| value as f32).collect();
                assert_eq!(got, [want]);
            }
        }
        store.finish()?;
        // Four of the largest, and of each smaller size that was outgrown no more than half of that.
        let room = meter.report().of(MemoryCategory::Disk).now;
        assert!(room <= 2 * 4 * 600 * 4, "{room}");
        Ok(())
    }

    #[test]
    fn what_comes_while_there_is_room_stays() -> Result<()> {
        let (dir, meter) = (tempfile::tempdir()?, MemoryMeter::default());
        let place = OffloadPlace::File(dir.path());
        let store = WaitingStore::new(place, 100, &Device::Cpu, &meter)?.expect("a store");
        let put = |value: f32, len: usize| {
            let xs = Tensor::full(value, len, &Device::Cpu)?;
            store.put(Lane::Activations, xs)
        };
        // 40, 64 and 60 bytes.
        let (first, second, third) = (put(1., 10)?, put(2., 16)?, put(3., 15)?);
        assert!(matches!(first, Stored::Kept { .. }));
        assert!(matches!(second, Stored::Away(_)));
        assert!(matches!(third, Stored::Kept { .. }));
        drop(first);
        let fourth = put(4., 11)?;
        assert!(
            matches!(fourth, Stored::Away(_)),
            "44 bytes in 40 that are free"
        );
        let fifth = put(5., 10)?;
        assert!(matches!(fifth, Stored::Kept { .. }));
        for (stored, value, len) in [(&second, 2., 16), (&fourth, 4., 11), (&fifth, 5., 10)] {
            assert_eq!(stored.get()?.to_vec1::<f32>()?, vec![value; len]);
        }
        Ok(())
    }
}
