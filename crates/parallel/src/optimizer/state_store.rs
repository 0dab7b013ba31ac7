//! State and masters of all buckets, wherever they are between updates.

use candle_core::{DType, Device, Result, Tensor};

use super::master_weights::master_dtype;
use super::state_file::StateFile;
use super::state_on_host::StateOnHost;
use super::{Offload, Optimizer};
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

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
    Host(StateOnHost),
    File(StateFile),
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

    /// The tensors of a bucket of this shape by their roles, on `device`.
    pub fn assemble(&self, tensors: &[Tensor], device: &Device) -> Result<BucketState> {
        let mut tensors = tensors.iter().map(|values| values.to_device(device));
        let state = tensors
            .by_ref()
            .take(self.kinds.len())
            .collect::<Result<_>>()?;
        let master = tensors.next().transpose()?;
        Ok(BucketState { state, master })
    }
}

/// Of each bucket the one that is updated after it, if `order` is that of updates; the first one after the last.
pub(crate) fn next_in(order: &[usize]) -> Vec<usize> {
    let mut next = vec![0; order.len()];
    for (place, &index) in order.iter().enumerate() {
        next[index] = order[(place + 1) % order.len()];
    }
    next
}

impl BucketState {
    /// All tensors: those of the state, then the masters.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().chain(&self.master)
    }
}

impl StateStore {
    /// Buckets of these shapes where `offload` says, with the values that `make` gives each on `device`; `order` is that of updates.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(
        offload: &Offload,
        device: &Device,
        meter: &MemoryMeter,
        shapes: Vec<BucketShape>,
        order: &[usize],
        make: impl FnMut(usize) -> Result<BucketState>,
    ) -> Result<Self> {
        let next = next_in(order);
        Ok(Self(match offload {
            Offload::Host if !device.is_cpu() => {
                Place::Host(StateOnHost::new(shapes, next, device, meter, make)?)
            }
            Offload::None | Offload::Host => {
                let buckets = (0..shapes.len()).map(make).collect::<Result<_>>()?;
                let num_bytes = shapes.iter().map(BucketShape::num_bytes).sum();
                let _held = meter.hold(MemoryCategory::Optimizer, num_bytes);
                Place::Resident { buckets, _held }
            }
            Offload::Nvme(dir) => {
                Place::File(StateFile::create(dir, shapes, next, device, meter, make)?)
            }
        }))
    }

    /// Lets `look` read bucket `index`.
    pub fn read<T>(&self, index: usize, look: impl FnOnce(&BucketState) -> Result<T>) -> Result<T> {
        match &self.0 {
            Place::Resident { buckets, .. } => look(&buckets[index]),
            Place::Host(host) => host.read(index, look),
            Place::File(file) => file.read(index, look),
        }
    }

    /// Lets `change` write to the tensors of bucket `index`.
    pub fn change<T>(
        &self,
        index: usize,
        change: impl FnOnce(&BucketState) -> Result<T>,
    ) -> Result<T> {
        match &self.0 {
            Place::Resident { buckets, .. } => change(&buckets[index]),
            Place::Host(host) => host.change(index, false, change),
            Place::File(file) => file.change(index, false, change),
        }
    }

    /// As [`Self::change`]; the bucket that is next in the order of updates is fetched meanwhile.
    pub fn update<T>(
        &self,
        index: usize,
        update: impl FnOnce(&BucketState) -> Result<T>,
    ) -> Result<T> {
        match &self.0 {
            Place::Resident { .. } => self.change(index, update),
            Place::Host(host) => host.change(index, true, update),
            Place::File(file) => file.change(index, true, update),
        }
    }
}
