//! Items of a GPU in the host's memory, copied beside what the GPU computes (arXiv:2101.06840).
//!
//! ```text
//! GPU       .. uses 1           .. uses 2           .. uses 3
//! up        fetches 2           fetches 3           fetches 4
//! down      stores 0            stores 1            stores 2
//! ```
//! The host waits for none of it, but before it fetches a part of an item for the last copy of all of it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{HostBuffer, HostCopies, HostCopy};

use super::store::{Fetched, Items, Kept};
use crate::memory::{MemoryGuard, MemoryMeter};

/// The items of one rank.
pub(super) struct HostStore {
    copies: HostCopies,
    items: Mutex<HostItems>,
    meter: MemoryMeter,
}

struct HostItems {
    kept: Kept,
    buffers: Vec<Vec<HostBuffer>>,
    /// Of items that are parts of others, by index: the other one, and which of its values.
    views: HashMap<usize, (usize, Range<usize>)>,
    /// What nobody has asked for yet.
    ahead: HashMap<usize, Moving>,
    /// On its way to the host.
    behind: Option<Moving>,
}

/// An item's tensors that are being copied.
struct Moving {
    copies: Vec<HostCopy>,
    held: MemoryGuard,
}

impl HostStore {
    /// All items, as `make` gives them.
    pub fn new(
        kept: Kept,
        device: &Device,
        meter: &MemoryMeter,
        mut make: impl FnMut(usize) -> Result<Vec<Tensor>>,
    ) -> Result<Self> {
        let copies = HostCopies::new(device)?;
        let mut all = Vec::with_capacity(kept.items.len());
        for (index, item) in kept.items.iter().enumerate() {
            let mut buffers = buffers(&copies, item)?;
            for (values, buffer) in make(index)?.into_iter().zip(&mut buffers) {
                copies.start_store(values, buffer)?;
            }
            all.push(buffers);
        }
        Ok(Self {
            copies,
            items: Mutex::new(HostItems {
                kept,
                buffers: all,
                views: HashMap::new(),
                ahead: HashMap::new(),
                behind: None,
            }),
            meter: meter.clone(),
        })
    }

    fn items(&self) -> MutexGuard<'_, HostItems> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, items: &mut HostItems, index: usize) -> Result<Moving> {
        let held = items.kept.hold(index, &self.meter);
        let (of, part) = match items.views.get(&index) {
            Some((of, part)) => (*of, Some(part.clone())),
            None => (index, None),
        };
        let buffers = items.buffers[of].iter_mut();
        let copies = buffers.map(|buffer| match &part {
            Some(part) => self.copies.start_fetch_part(buffer, part.clone()),
            None => self.copies.start_fetch(buffer),
        });
        let copies = copies.collect::<Result<_>>()?;
        Ok(Moving { copies, held })
    }
}

impl Items for HostStore {
    fn add(&self, item: Vec<(usize, DType)>) -> Result<usize> {
        let buffers = buffers(&self.copies, &item)?;
        let mut items = self.items();
        items.buffers.push(buffers);
        items.kept.items.push(item);
        Ok(items.buffers.len() - 1)
    }

    fn view(&self, index: usize, part: Range<usize>) -> usize {
        let mut items = self.items();
        let dtypes = items.kept.items[index].first().map(|(_, dtype)| *dtype);
        let item = dtypes.map(|dtype| (part.len(), dtype));
        items.kept.items.push(item.into_iter().collect());
        items.buffers.push(Vec::new());
        let view = items.buffers.len() - 1;
        items.views.insert(view, (index, part));
        view
    }

    fn refit(&self, index: usize, item: &[(usize, DType)]) -> Result<()> {
        let mut items = self.items();
        if items.kept.items[index] != item {
            items.buffers[index] = buffers(&self.copies, item)?;
            items.kept.items[index] = item.to_vec();
        }
        Ok(())
    }

    fn start_fetch(&self, index: usize) -> Result<()> {
        let mut items = self.items();
        if !items.ahead.contains_key(&index) {
            let moving = self.start(&mut items, index)?;
            items.ahead.insert(index, moving);
        }
        Ok(())
    }

    fn fetch(&self, index: usize) -> Result<Fetched> {
        let mut items = self.items();
        let Moving { copies, held } = match items.ahead.remove(&index) {
            Some(moving) => moving,
            None => {
                items.ahead.clear();
                self.start(&mut items, index)?
            }
        };
        let tensors = copies.into_iter().map(HostCopy::wait);
        let tensors = tensors.collect::<Result<_>>()?;
        Ok(Fetched { tensors, held })
    }

    fn store(&self, index: usize, item: Fetched) -> Result<()> {
        let Fetched { tensors, held } = item;
        let mut items = self.items();
        items.ahead.remove(&index);
        let stores = tensors.into_iter().zip(&mut items.buffers[index]);
        let stores = stores.map(|(values, buffer)| self.copies.start_store(values, buffer));
        let copies = stores.collect::<Result<_>>()?;
        // Frees the item before it on the GPU, once that is on the host.
        items.behind = Some(Moving { copies, held });
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.items().behind = None;
        Ok(())
    }

    fn forget(&self, index: usize) -> Result<()> {
        self.items().ahead.remove(&index);
        Ok(())
    }
}

/// Room on the host for tensors of these lengths and types.
fn buffers(copies: &HostCopies, item: &[(usize, DType)]) -> Result<Vec<HostBuffer>> {
    let buffers = item.iter().map(|&(len, dtype)| copies.buffer(len, dtype));
    buffers.collect()
}
