//! State and masters of all buckets, wherever they are between updates.

use candle_core::{DType, Device, Result, Tensor};

use super::Optimizer;
use super::master_weights::master_dtype;
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};
use crate::offload::{Kept, OffloadPlace, OffloadStore};

/// Of the part of one bucket that a rank updates, on the device that computes.
#[derive(Clone)]
pub(crate) struct BucketState {
    /// A tensor for each kind of state of each rule.
    pub state: Vec<Tensor>,
    /// The weights in f32, if the model's are narrower, or their remainders.
    pub master: Option<Tensor>,
}

/// What a bucket's state is, before there is any.
pub(crate) struct BucketShape {
    /// Number of values that the rank updates.
    pub len: usize,
    /// Number of values of each of the rules' kinds of state.
    pub kinds: Vec<usize>,
    /// Type of the masters, if there are any: F32, or I16 of remainders.
    pub master: Option<DType>,
}

/// A bucket's state for as long as an update or a look at it takes.
pub(super) struct StateStore(Place);

enum Place {
    Resident {
        buckets: Vec<BucketState>,
        _held: MemoryGuard,
    },
    Away {
        store: Box<OffloadStore>,
        shapes: Vec<BucketShape>,
    },
}

impl BucketShape {
    /// Of `len` values of type `dtype`, the first of them of parameter `name`, that `rule` updates wherever they lie.
    ///
    /// # Errors
    /// A type that cannot be trained.
    pub fn of_rule(rule: &dyn Optimizer, len: usize, dtype: DType, name: &str) -> Result<Self> {
        Ok(Self {
            len,
            kinds: vec![len; rule.state_names().len()],
            master: master_dtype(dtype, name, rule.takes_remainders())?,
        })
    }

    /// Lengths and types of the tensors: those of the state, then that of the masters if there are any.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, DType)> {
        let kinds = self.kinds.iter().map(|&len| (len, DType::F32));
        kinds.chain(self.master.map(|dtype| (self.len, dtype)))
    }

    pub fn num_bytes(&self) -> usize {
        let bytes = self
            .tensors()
            .map(|(len, dtype)| len * dtype.size_in_bytes());
        bytes.sum()
    }

    /// The tensors of a bucket of this shape by their roles.
    fn assemble(&self, tensors: &[Tensor]) -> BucketState {
        let (state, master) = tensors.split_at(self.kinds.len());
        BucketState {
            state: state.to_vec(),
            master: master.first().cloned(),
        }
    }
}

impl BucketState {
    /// All tensors: those of the state, then the masters.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().chain(&self.master)
    }
}

impl StateStore {
    /// Buckets of these shapes where `place` says, with the values that `make` gives each on `device`.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(
        place: OffloadPlace<'_>,
        device: &Device,
        meter: &MemoryMeter,
        shapes: Vec<BucketShape>,
        mut make: impl FnMut(usize) -> Result<BucketState>,
    ) -> Result<Self> {
        let items = shapes.iter().map(|shape| shape.tensors().collect());
        let kept = Kept {
            what: "the optimizer's state",
            category: MemoryCategory::Optimizer,
            items: items.collect(),
        };
        let tensors = |index| Ok(make(index)?.tensors().cloned().collect());
        let store = OffloadStore::new(place, kept, device, meter, tensors)?;
        Ok(Self(match store {
            Some(store) => Place::Away {
                store: Box::new(store),
                shapes,
            },
            None => {
                let buckets = (0..shapes.len()).map(make).collect::<Result<_>>()?;
                let num_bytes = shapes.iter().map(BucketShape::num_bytes).sum();
                let _held = meter.hold(MemoryCategory::Optimizer, num_bytes);
                Place::Resident { buckets, _held }
            }
        }))
    }

    /// Lets `look` read bucket `index`, which stays in memory until another one is asked for.
    pub fn read<T>(&self, index: usize, look: impl FnOnce(&BucketState) -> Result<T>) -> Result<T> {
        match &self.0 {
            Place::Resident { buckets, .. } => look(&buckets[index]),
            Place::Away { store, shapes, .. } => {
                let item = store.fetch(index)?;
                let seen = look(&shapes[index].assemble(&item.tensors));
                store.keep(index, item);
                seen
            }
        }
    }

    /// Lets `change` write to the tensors of bucket `index`; those of `next`, which is to be changed after it, come meanwhile. Without one all
    /// changes are written when this returns.
    pub fn change<T>(
        &self,
        index: usize,
        next: Option<usize>,
        change: impl FnOnce(&BucketState) -> Result<T>,
    ) -> Result<T> {
        match &self.0 {
            Place::Resident { buckets, .. } => change(&buckets[index]),
            Place::Away { store, shapes, .. } => {
                let item = store.fetch(index)?;
                if let Some(next) = next {
                    store.start_fetch(next)?;
                }
                let changed = change(&shapes[index].assemble(&item.tensors))?;
                store.store(index, item)?;
                if next.is_none() {
                    store.finish()?;
                }
                Ok(changed)
            }
        }
    }
}
