//! State and masters of all buckets, wherever they are between updates.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::optimizer::Optimizer;
use crate::memory::{MemoryCategory, MemoryMeter};
use crate::offload::{Column, Kept, OffloadPlace};
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

/// State and masters, an item for each part of a bucket that is updated at a time.
pub(crate) struct StateStore {
    shapes: Vec<BucketShape>,
    slices: StateSlices,
    pub column: Column,
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

    /// Lengths and types of the tensors of a part that is updated at a time: those of the state, then that of the masters if there are any.
    pub fn tensors_of(&self, part: &Range<usize>) -> Vec<(usize, DType)> {
        let kinds = self.kinds.iter().map(|&len| (len, DType::F32));
        let tensors = kinds.chain(self.master.map(|dtype| (self.len, dtype)));
        let len = |len| if self.is_divisible { part.len() } else { len };
        tensors.map(|(whole, dtype)| (len(whole), dtype)).collect()
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

/// The parts of each bucket that are updated at a time: the items of the optimizer's state, bucket after bucket.
pub(crate) struct StateSlices {
    /// Buckets and parts of them, by item.
    items: Vec<(usize, Range<usize>)>,
    num_parts: Vec<usize>,
}

impl StateSlices {
    /// Parts of `num_values` or less, of what can be updated in parts.
    pub fn new(shapes: &[BucketShape], num_values: usize) -> Self {
        let step = num_values.max(1).checked_next_multiple_of(SLICE_ALIGNMENT);
        let parts = shapes.iter().map(|shape| match step {
            Some(step) if shape.is_divisible && shape.len > step => {
                let starts = (0..shape.len).step_by(step);
                let parts = starts.map(|start| start..(start + step).min(shape.len));
                parts.collect()
            }
            _ => vec![0..shape.len],
        });
        let parts: Vec<Vec<Range<usize>>> = parts.collect();
        Self {
            num_parts: parts.iter().map(Vec::len).collect(),
            items: (parts.into_iter().enumerate())
                .flat_map(|(index, parts)| parts.into_iter().map(move |part| (index, part)))
                .collect(),
        }
    }

    /// In how many parts each bucket is updated.
    pub fn num_parts(&self) -> &[usize] {
        &self.num_parts
    }

    /// The bucket of an item, and which part of it that is.
    pub fn part(&self, item: usize) -> (usize, &Range<usize>) {
        let (index, part) = &self.items[item];
        (*index, part)
    }

    /// The items of bucket `index`.
    fn of(&self, index: usize) -> Range<usize> {
        let first = self.num_parts[..index].iter().sum();
        first..first + self.num_parts[index]
    }

    /// Lengths and types of the tensors of each item.
    pub fn items(&self, shapes: &[BucketShape]) -> Vec<Vec<(usize, DType)>> {
        let items = self.items.iter();
        items
            .map(|(index, part)| shapes[*index].tensors_of(part))
            .collect()
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
        let is_away = place.category().is_some();
        let slices = StateSlices::new(&shapes, if is_away { update_values } else { usize::MAX });
        let category = MemoryCategory::Optimizer;
        let kept = Kept {
            what: "the optimizer's state",
            category,
            items: slices.items(&shapes),
        };
        let tensors = |item: usize| {
            let (index, part) = &slices.items[item];
            Ok(make(*index, part)?.tensors().cloned().collect())
        };
        Ok(Self {
            column: Column::new(place, kept, category, device, meter, tensors)?,
            shapes,
            slices,
        })
    }

    /// What there is of bucket `index`.
    pub fn shape(&self, index: usize) -> &BucketShape {
        &self.shapes[index]
    }

    /// In how many parts each bucket is updated.
    pub fn num_parts(&self) -> &[usize] {
        self.slices.num_parts()
    }

    /// The parts of bucket `index` that are read or updated at a time.
    pub fn parts(&self, index: usize) -> Vec<Range<usize>> {
        let items = self.slices.of(index);
        items.map(|item| self.part(item).1.clone()).collect()
    }

    /// [`StateSlices::part`].
    pub fn part(&self, item: usize) -> (usize, &Range<usize>) {
        self.slices.part(item)
    }

    /// The tensors of an item, to be written to.
    pub fn get(&self, item: usize) -> Result<BucketState> {
        let (index, _) = self.part(item);
        Ok(self.shapes[index].assemble(&self.column.get(item)?))
    }

    /// Lets `look` read the parts of bucket `index` that have values at `range`; the last one stays in memory until another is asked for.
    pub fn read(
        &self,
        index: usize,
        range: &Range<usize>,
        mut look: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        let is_asked = |item: &usize| !intersect(self.part(*item).1, range).is_empty();
        let mut items = self.slices.of(index).filter(is_asked).peekable();
        while let Some(item) = items.next() {
            let (shape, part) = (&self.shapes[index], self.part(item).1);
            let next = items.peek().copied();
            (self.column).look(item, next, |tensors| look(part, &shape.assemble(tensors)))?;
        }
        Ok(())
    }

    /// Frees what [`Self::read`] left of bucket `index` in memory.
    pub fn forget(&self, index: usize) -> Result<()> {
        let mut items = self.slices.of(index);
        items.try_for_each(|item| self.column.free(item))
    }

    /// Lets `change` write to the tensors of bucket `index`, part by part. All changes are written when this returns.
    pub fn change(
        &self,
        index: usize,
        mut change: impl FnMut(&Range<usize>, &BucketState) -> Result<()>,
    ) -> Result<()> {
        for item in self.slices.of(index) {
            let state = self.get(item)?;
            if item + 1 < self.slices.of(index).end {
                self.column.fetch(item + 1)?;
            }
            if let Err(err) = change(self.part(item).1, &state) {
                self.column.free(item)?;
                return Err(err);
            }
            self.column.put(item)?;
        }
        self.column.flush()
    }
}
