//! Flat tensors of a rank, item by item, wherever they are kept.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Tensor, bail};

use super::config::OffloadPlace;
use super::store::{Fetched, Kept, OffloadStore, num_bytes_of};
use crate::memory::{MemoryCategory, MemoryMeter};

/// Slices of weights, sums of gradients or the optimizer's state: on the device always, or for their uses only.
pub(crate) struct Column {
    what: &'static str,
    category: MemoryCategory,
    shapes: Vec<Vec<(usize, DType)>>,
    items: Mutex<Items>,
    away: Option<OffloadStore>,
    device: Device,
    meter: MemoryMeter,
}

struct Items {
    /// Items that are on the device.
    here: Vec<Option<Fetched>>,
    /// Items that are away and of whose values nothing is needed any more.
    is_blank: Vec<bool>,
    /// The item that was read last, until another one is asked for.
    read: Option<(usize, Fetched)>,
}

impl Column {
    /// All items, with the tensors that `make` gives each on `device`, where `place` says. On the device they count as `resident`.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(
        place: OffloadPlace<'_>,
        kept: Kept,
        resident: MemoryCategory,
        device: &Device,
        meter: &MemoryMeter,
        mut make: impl FnMut(usize) -> Result<Vec<Tensor>>,
    ) -> Result<Self> {
        let (what, category, shapes) = (kept.what, kept.category, kept.items.clone());
        let away = OffloadStore::new(place, kept, device, meter, &mut make)?;
        let here = shapes.iter().enumerate().map(|(index, shape)| {
            if away.is_some() {
                return Ok(None);
            }
            let tensors = make(index)?;
            let held = meter.hold(resident, num_bytes_of(shape.iter().copied()));
            Ok(Some(Fetched { tensors, held }))
        });
        Ok(Self {
            what,
            category,
            items: Mutex::new(Items {
                here: here.collect::<Result<_>>()?,
                is_blank: vec![false; shapes.len()],
                read: None,
            }),
            shapes,
            away,
            device: device.clone(),
            meter: meter.clone(),
        })
    }

    /// Where items are kept, if not on the device.
    pub fn away(&self) -> Option<&OffloadStore> {
        self.away.as_ref()
    }

    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    fn items(&self) -> MutexGuard<'_, Items> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Items that are on the device though they are kept away.
    pub fn visitors(&self) -> Vec<usize> {
        let items = self.items();
        let here = items.here.iter().enumerate();
        let here = here.filter(|(_, item)| self.is_away() && item.is_some());
        here.map(|(index, _)| index).collect()
    }

    /// Starts to fetch an item.
    pub fn fetch(&self, index: usize) -> Result<()> {
        let mut items = self.items();
        items.forget_other(index);
        match &self.away {
            Some(away) if items.here[index].is_none() && items.read.is_none() => {
                if !items.is_blank[index] {
                    return away.start_fetch(index);
                }
                items.here[index] = Some(self.zeros(index)?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn zeros(&self, index: usize) -> Result<Fetched> {
        let shape = &self.shapes[index];
        let bytes = num_bytes_of(shape.iter().copied());
        let zeros = shape.iter().map(|&(len, dtype)| {
            // A GPU allocates no 0 bytes.
            Tensor::zeros(len.max(1), dtype, &self.device)?.narrow(0, 0, len)
        });
        Ok(Fetched {
            tensors: zeros.collect::<Result<_>>()?,
            held: self.meter.hold(self.category, bytes),
        })
    }

    /// Takes an item off those that are here, or off those that are away.
    fn load(&self, items: &mut Items, index: usize) -> Result<Fetched> {
        items.forget_other(index);
        let read = items.read.take().map(|(_, item)| item);
        match (items.here[index].take().or(read), &self.away) {
            (Some(item), _) => Ok(item),
            (None, Some(_)) if items.is_blank[index] => self.zeros(index),
            (None, Some(away)) => away.fetch(index),
            (None, None) => bail!("item {index} of {} is not on this rank", self.what),
        }
    }

    /// The tensors of an item, to be read and written: they stay on the device until it is put back or freed.
    pub fn get(&self, index: usize) -> Result<Vec<Tensor>> {
        let mut items = self.items();
        let item = self.load(&mut items, index)?;
        let item = items.here[index].insert(item);
        Ok(item.tensors.clone())
    }

    /// The tensors of an item, to be read: they stay until another one is asked for.
    pub fn read(&self, index: usize) -> Result<Vec<Tensor>> {
        self.look(index, None, |tensors| Ok(tensors.to_vec()))
    }

    /// Lets `look` read the tensors of an item, which stay until another one is asked for; `next`, which is read after it, comes meanwhile.
    pub fn look<T>(
        &self,
        index: usize,
        next: Option<usize>,
        look: impl FnOnce(&[Tensor]) -> Result<T>,
    ) -> Result<T> {
        let mut items = self.items();
        if let Some(item) = &items.here[index] {
            let tensors = item.tensors.clone();
            drop(items);
            return look(&tensors);
        }
        let item = self.load(&mut items, index)?;
        drop(items);
        if let Some(next) = next {
            self.fetch(next)?;
        }
        let seen = look(&item.tensors);
        self.items().read = Some((index, item));
        seen
    }

    /// An item that is kept away, of which nothing is put back.
    pub fn take(&self, index: usize) -> Result<Fetched> {
        self.load(&mut self.items(), index)
    }

    /// Starts to put an item back.
    pub fn put(&self, index: usize) -> Result<()> {
        let Some(away) = &self.away else {
            return Ok(());
        };
        let item = self.take(index)?;
        self.items().is_blank[index] = false;
        away.store(index, item)
    }

    /// Frees what is on the device of an item that is kept away.
    pub fn free(&self, index: usize) -> Result<()> {
        let Some(away) = &self.away else {
            return Ok(());
        };
        let mut items = self.items();
        items.here[index] = None;
        items.read.take_if(|(read, _)| *read == index);
        away.forget(index)
    }

    /// Frees what was read last.
    pub fn forget_read(&self) {
        self.items().read = None;
    }

    /// Frees what is on the device of items that are kept away.
    pub fn clear(&self) {
        if self.is_away() {
            let mut items = self.items();
            items.here.fill_with(|| None);
            items.read = None;
        }
    }

    /// Has an item begin with zeros when it comes next: nothing is read for it.
    pub fn blank(&self, index: usize) {
        let mut items = self.items();
        items.is_blank[index] = self.is_away();
        items.read.take_if(|(read, _)| *read == index);
    }

    /// Waits until all that was put back is where it is kept.
    pub fn flush(&self) -> Result<()> {
        match &self.away {
            Some(away) => away.finish(),
            None => Ok(()),
        }
    }
}

impl Items {
    /// Frees what was read last, unless it is this item.
    fn forget_other(&mut self, index: usize) {
        self.read.take_if(|(read, _)| *read != index);
    }
}
