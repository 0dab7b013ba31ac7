//! Items of a rank's tensors that are on its device only while they are used.

use std::ops::{Deref, Range};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

use super::config::OffloadPlace;
use super::file_store::FileStore;
use super::host_store::HostStore;
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

/// What a store keeps.
pub(crate) struct Kept {
    /// For messages: "the optimizer's state".
    pub what: &'static str,
    /// As what it counts while it is on the device or on its way.
    pub category: MemoryCategory,
    /// Of each item lengths and types of its flat tensors.
    pub items: Vec<Vec<(usize, DType)>>,
}

impl Kept {
    pub fn num_bytes(&self, index: usize) -> usize {
        num_bytes_of(self.items[index].iter().copied())
    }

    /// Counts the bytes of an item; of activations none, as [`MemoryMeter::count_activations`] counts those.
    pub fn hold(&self, index: usize, meter: &MemoryMeter) -> MemoryGuard {
        let bytes = match self.category {
            MemoryCategory::Activations => 0,
            _ => self.num_bytes(index),
        };
        meter.hold(self.category, bytes)
    }
}

/// Bytes of tensors of these lengths and types.
pub(crate) fn num_bytes_of(tensors: impl IntoIterator<Item = (usize, DType)>) -> usize {
    let tensors = tensors.into_iter();
    tensors
        .map(|(len, dtype)| len * dtype.size_in_bytes())
        .sum()
}

/// The tensors of an item on the device, which count as long as this is there.
pub(crate) struct Fetched {
    pub tensors: Vec<Tensor>,
    pub held: MemoryGuard,
}

/// Items in the host's memory, or in a file. What is written is what later fetches give, whatever was under way.
pub(crate) struct OffloadStore {
    items: Box<dyn Items>,
    category: MemoryCategory,
    meter: MemoryMeter,
    held: Mutex<Vec<MemoryGuard>>,
    /// Parts of items that are items, too: (the item, its part).
    views: Mutex<Vec<(usize, usize)>>,
}

/// The items where they are kept.
pub(crate) trait Items: Send + Sync {
    /// One more item, of flat tensors of these lengths and types, which is to be stored before it is fetched.
    ///
    /// # Errors
    /// Memory or space that is missing.
    fn add(&self, item: Vec<(usize, DType)>) -> Result<usize>;

    /// The values `part` of an item of one tensor, as an item that is fetched and never stored.
    fn view(&self, index: usize, part: Range<usize>) -> usize;

    /// Has an item be of tensors of these lengths and types from now on, which take no more than those it was added for; it is to be stored before
    /// it is fetched.
    ///
    /// # Errors
    /// Memory that is missing.
    fn refit(&self, index: usize, item: &[(usize, DType)]) -> Result<()>;

    /// Starts to fetch an item, so that [`Self::fetch`] has it sooner.
    fn start_fetch(&self, index: usize) -> Result<()>;

    /// The tensors of an item. Unless it was on its way, what else is waits for nobody any more.
    fn fetch(&self, index: usize) -> Result<Fetched>;

    /// Writes an item back, after the return.
    fn store(&self, index: usize, item: Fetched) -> Result<()>;

    /// Waits until a file has what was stored, so that nothing of it is held any more; memory of the host gets it in the order of the GPU's
    /// work.
    fn finish(&self) -> Result<()>;

    /// Frees what was fetched of an item and not asked for.
    fn forget(&self, index: usize) -> Result<()>;
}

impl Deref for OffloadStore {
    type Target = dyn Items;

    fn deref(&self) -> &Self::Target {
        &*self.items
    }
}

impl OffloadStore {
    /// All items, with the tensors that `make` gives each on `device`; `None` if they are to stay there.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(
        place: OffloadPlace<'_>,
        kept: Kept,
        device: &Device,
        meter: &MemoryMeter,
        make: impl FnMut(usize) -> Result<Vec<Tensor>>,
    ) -> Result<Option<Self>> {
        let Some(category) = place.category() else {
            return Ok(None);
        };
        let items = 0..kept.items.len();
        let num_bytes = items.map(|index| kept.num_bytes(index)).sum();
        Ok(Some(Self {
            views: Mutex::default(),
            held: Mutex::new(vec![meter.hold(category, num_bytes)]),
            category,
            meter: meter.clone(),
            items: match place {
                OffloadPlace::File(dir) => {
                    Box::new(FileStore::create(dir, kept, device, meter, make)?)
                }
                _ => Box::new(HostStore::new(kept, device, meter, make)?),
            },
        }))
    }

    /// [`Items::add`], which counts.
    ///
    /// # Errors
    /// Memory or space that is missing.
    pub fn add(&self, item: Vec<(usize, DType)>) -> Result<usize> {
        let bytes = num_bytes_of(item.iter().copied());
        let held = self.meter.hold(self.category, bytes);
        let index = self.items.add(item)?;
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(held);
        Ok(index)
    }

    /// [`Items::view`], of which nothing is kept when the item is stored.
    pub fn view(&self, index: usize, part: Range<usize>) -> usize {
        let item = self.items.view(index, part);
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        views.push((index, item));
        item
    }

    /// [`Items::store`].
    pub fn store(&self, index: usize, item: Fetched) -> Result<()> {
        let views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        let mut views = views.iter().filter(|(of, _)| *of == index);
        views.try_for_each(|(_, part)| self.forget(*part))?;
        self.items.store(index, item)
    }
}
