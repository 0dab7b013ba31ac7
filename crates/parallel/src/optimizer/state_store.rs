//! State and masters of all buckets, wherever they are between updates.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::optimizer::Optimizer;
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};
use crate::offload::{Kept, OffloadPlace, OffloadStore, num_bytes_of};
use crate::params::SLICE_ALIGNMENT;
use crate::placement::intersect;

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
    /// Whether any part of the values can be updated without the others.
    pub is_divisible: bool,
}

/// Kind of state: the f32 weights that the optimizer updates, those of the model or the masters of narrower ones.
pub(crate) const MASTER: &str = "master";

/// Type of the masters of weights of type `dtype`, the first of which are those of parameter `name`: F32, or I16 for remainders, if the rules
/// take those; `None` if the weights are f32.
pub(super) fn master_dtype(
    dtype: DType,
    name: &str,
    takes_remainders: bool,
) -> Result<Option<DType>> {
    match dtype {
        DType::F32 => Ok(None),
        DType::BF16 if takes_remainders => Ok(Some(DType::I16)),
        DType::BF16 | DType::F16 => Ok(Some(DType::F32)),
        dtype => bail!("parameter {name} is of type {dtype:?}; expected F32, BF16 or F16"),
    }
}

/// A bucket's state for as long as an update or a look at it takes.
pub(super) struct StateStore {
    shapes: Vec<BucketShape>,
    slices: StateSlices,
    place: StatePlace,
}

enum StatePlace {
    Here {
        buckets: Vec<BucketState>,
        _held: MemoryGuard,
    },
    Away(Box<OffloadStore>),
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
            is_divisible: true,
        })
    }

    /// Lengths and types of the tensors: those of the state, then that of the masters if there are any.
    pub fn tensors(&self) -> impl Iterator<Item = (usize, DType)> {
        let kinds = self.kinds.iter().map(|&len| (len, DType::F32));
        kinds.chain(self.master.map(|dtype| (self.len, dtype)))
    }

    /// The same of a part that is updated at a time.
    pub fn tensors_of(&self, part: &Range<usize>) -> Vec<(usize, DType)> {
        let len = |len| if self.is_divisible { part.len() } else { len };
        let tensors = self.tensors();
        tensors.map(|(whole, dtype)| (len(whole), dtype)).collect()
    }

    pub fn num_bytes(&self) -> usize {
        num_bytes_of(self.tensors())
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

/// The parts of each bucket that are updated at a time, where its state is away: the items that are fetched and stored.
pub(crate) struct StateSlices {
    /// Of each bucket.
    parts: Vec<Vec<Range<usize>>>,
    /// The first item of each bucket.
    first: Vec<usize>,
}

impl StateSlices {
    /// Parts of `num_values` or less, of what can be updated in parts.
    pub fn new(shapes: &[BucketShape], num_values: usize) -> Self {
        let step = num_values.max(1).next_multiple_of(SLICE_ALIGNMENT);
        let parts = shapes.iter().map(|shape| match shape.is_divisible {
            true if shape.len > step => {
                let starts = (0..shape.len).step_by(step);
                let parts = starts.map(|start| start..(start + step).min(shape.len));
                parts.collect()
            }
            _ => vec![0..shape.len],
        });
        let parts: Vec<Vec<Range<usize>>> = parts.collect();
        let mut next = 0;
        let first = parts.iter().map(|parts| {
            let first = next;
            next += parts.len();
            first
        });
        Self {
            first: first.collect(),
            parts,
        }
    }

    /// The parts of bucket `index`, each with its item and the one that is updated after it, if `next` is the bucket after this one.
    pub fn of(
        &self,
        index: usize,
        next: Option<usize>,
    ) -> impl Iterator<Item = (usize, Option<usize>, &Range<usize>)> {
        let (first, last) = (self.first[index], self.parts[index].len() - 1);
        let next = next.map(|next| self.first[next]);
        let parts = self.parts[index].iter().enumerate();
        parts.map(move |(place, part)| {
            let item = first + place;
            let next = if place < last { Some(item + 1) } else { next };
            (item, next, part)
        })
    }

    /// Lengths and types of the tensors of each item.
    pub fn items(&self, shapes: &[BucketShape]) -> Vec<Vec<(usize, DType)>> {
        let parts = shapes.iter().zip(&self.parts);
        let items =
            parts.flat_map(|(shape, parts)| parts.iter().map(|part| shape.tensors_of(part)));
        items.collect()
    }
}

impl BucketState {
    /// All tensors: those of the state, then the masters.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.state.iter().chain(&self.master)
    }
}

impl StateStore {
    /// Buckets of these shapes where `place` says, with the values that `make` gives a part of each on `device`; away, `update_values` are
    /// updated at a time.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(
        place: OffloadPlace<'_>,
        update_values: usize,
        device: &Device,
        meter: &MemoryMeter,
        shapes: Vec<BucketShape>,
        mut make: impl FnMut(usize, &Range<usize>) -> Result<BucketState>,
    ) -> Result<Self> {
        let slices = StateSlices::new(&shapes, update_values);
        let kept = Kept {
            what: "the optimizer's state",
            category: MemoryCategory::Optimizer,
            items: slices.items(&shapes),
        };
        let all = (0..shapes.len()).flat_map(|index| {
            let parts = slices.of(index, None);
            parts.map(move |(_, _, part)| (index, part))
        });
        let all: Vec<(usize, &Range<usize>)> = all.collect();
        let tensors = |item: usize| {
            let (index, part) = all[item];
            Ok(make(index, part)?.tensors().cloned().collect())
        };
        let store = OffloadStore::new(place, kept, device, meter, tensors)?;
        let place = match store {
            Some(store) => StatePlace::Away(Box::new(store)),
            None => {
                let buckets = shapes.iter().enumerate();
                let buckets = buckets.map(|(index, shape)| make(index, &(0..shape.len)));
                let buckets = buckets.collect::<Result<_>>()?;
                let num_bytes = shapes.iter().map(BucketShape::num_bytes).sum();
                let _held = meter.hold(MemoryCategory::Optimizer, num_bytes);
                StatePlace::Here { buckets, _held }
            }
        };
        Ok(Self {
            shapes,
            slices,
            place,
        })
    }

    /// What there is of bucket `index`.
    pub fn shape(&self, index: usize) -> &BucketShape {
        &self.shapes[index]
    }

    pub fn is_away(&self) -> bool {
        matches!(self.place, StatePlace::Away(_))
    }

    /// The parts of bucket `index` that are read or updated at a time: all at once, if nothing is away.
    pub fn parts(&self, index: usize) -> Vec<Range<usize>> {
        match &self.place {
            StatePlace::Here { .. } => vec![0..self.shapes[index].len],
            StatePlace::Away(_) => self.slices.parts[index].clone(),
        }
    }

    /// Lets `look` read the parts of bucket `index` that have values at `range`; the last one stays in memory until another is asked for.
    pub fn read(
        &self,
        index: usize,
        range: &Range<usize>,
        mut look: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        let shape = &self.shapes[index];
        let store = match &self.place {
            StatePlace::Here { buckets, .. } => return look(&(0..shape.len), &buckets[index]),
            StatePlace::Away(store) => store,
        };
        let is_asked = |part: &Range<usize>| !intersect(part, range).is_empty();
        for (item, after, part) in self.slices.of(index, None) {
            if !is_asked(part) {
                continue;
            }
            let fetched = store.fetch(item)?;
            if let Some(after) = after.filter(|_| part.end < range.end) {
                store.start_fetch(after)?;
            }
            let seen = look(part, &shape.assemble(&fetched.tensors));
            store.keep(item, fetched);
            seen?;
        }
        Ok(())
    }

    /// Frees what [`Self::read`] left of bucket `index` in memory.
    pub fn forget(&self, index: usize) -> Result<()> {
        match &self.place {
            StatePlace::Here { .. } => Ok(()),
            StatePlace::Away(store) => {
                let mut items = self.slices.of(index, None);
                items.try_for_each(|(item, ..)| store.forget(item))
            }
        }
    }

    /// Lets `update` write to the tensors of bucket `index`, part by part; what comes next, of this bucket or of `next`, is fetched meanwhile.
    /// Without a next one all changes are written when this returns.
    pub fn update(
        &self,
        index: usize,
        next: Option<usize>,
        mut update: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        let shape = &self.shapes[index];
        let store = match &self.place {
            StatePlace::Here { buckets, .. } => return update(&(0..shape.len), &buckets[index]),
            StatePlace::Away(store) => store,
        };
        for (item, after, part) in self.slices.of(index, next) {
            let fetched = store.fetch(item)?;
            if let Some(after) = after {
                store.start_fetch(after)?;
            }
            update(part, &shape.assemble(&fetched.tensors))?;
            store.store(item, fetched)?;
        }
        match next {
            Some(_) => Ok(()),
            None => store.finish(),
        }
    }
}
