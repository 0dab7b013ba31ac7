//! State and masters of a GPU in the host's memory, copied bucket by bucket beside the updates (arXiv:2101.06840).
//!
//! ```text
//! GPU       .. updates 1        .. updates 2        .. updates 3
//! up        fetches 2           fetches 3           fetches 4
//! down      stores 0            stores 1            stores 2
//! ```
//! So three buckets are on the GPU. The host waits for none of it.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};
use candle_ops::{HostBuffer, HostCopies, HostCopy};

use super::state_store::{BucketShape, BucketState};
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

/// The buckets of one rank.
pub(super) struct StateOnHost {
    device: Device,
    copies: HostCopies,
    shapes: Vec<BucketShape>,
    /// Of each bucket, the one that is updated after it.
    next: Vec<usize>,
    buckets: Mutex<Buckets>,
    meter: MemoryMeter,
}

struct Buckets {
    kept: Vec<Vec<HostBuffer>>,
    /// What nobody has asked for yet.
    ahead: Option<(usize, Moving)>,
    /// On its way to the host.
    behind: Option<Moving>,
}

/// A bucket's tensors that are being copied.
struct Moving {
    copies: Vec<HostCopy>,
    held: MemoryGuard,
}

impl StateOnHost {
    /// All buckets, as `make` gives them; `next` is the one that is updated after each.
    pub fn new(
        shapes: Vec<BucketShape>,
        next: Vec<usize>,
        device: &Device,
        meter: &MemoryMeter,
        mut make: impl FnMut(usize) -> Result<BucketState>,
    ) -> Result<Self> {
        let copies = HostCopies::new(device)?;
        let mut kept = Vec::with_capacity(shapes.len());
        for (index, shape) in shapes.iter().enumerate() {
            let buffers = shape
                .tensors()
                .map(|(len, dtype)| copies.buffer(len, dtype));
            let mut buffers = buffers.collect::<Result<Vec<_>>>()?;
            for (values, buffer) in make(index)?.tensors().zip(&mut buffers) {
                copies.start_store(values.clone(), buffer)?;
            }
            kept.push(buffers);
        }
        Ok(Self {
            device: device.clone(),
            copies,
            shapes,
            next,
            buckets: Mutex::new(Buckets {
                kept,
                ahead: None,
                behind: None,
            }),
            meter: meter.clone(),
        })
    }

    /// Lets `look` read bucket `index`.
    pub fn read<T>(&self, index: usize, look: impl FnOnce(&BucketState) -> Result<T>) -> Result<T> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let (tensors, _held) = self.fetch(&mut buckets, index)?;
        look(&self.shapes[index].assemble(&tensors, &self.device)?)
    }

    /// Lets `change` write to bucket `index`, which goes to the host after the return; `fetches_ahead`: the one that is updated next
    /// comes meanwhile.
    pub fn change<T>(
        &self,
        index: usize,
        fetches_ahead: bool,
        change: impl FnOnce(&BucketState) -> Result<T>,
    ) -> Result<T> {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let (tensors, held) = self.fetch(&mut buckets, index)?;
        let next = self.next[index];
        if fetches_ahead && next != index {
            let moving = self.start_fetch(&mut buckets, next)?;
            buckets.ahead = Some((next, moving));
        }
        let changed = change(&self.shapes[index].assemble(&tensors, &self.device)?)?;
        let stores = tensors.into_iter().zip(&mut buckets.kept[index]);
        let stores = stores.map(|(values, buffer)| self.copies.start_store(values, buffer));
        let copies = stores.collect::<Result<_>>()?;
        // Frees the bucket before it on the GPU, once that is on the host.
        buckets.behind = Some(Moving { copies, held });
        Ok(changed)
    }

    fn start_fetch(&self, buckets: &mut Buckets, index: usize) -> Result<Moving> {
        let held = self
            .meter
            .hold(MemoryCategory::Optimizer, self.shapes[index].num_bytes());
        let buffers = buckets.kept[index].iter_mut();
        let copies = buffers.map(|buffer| self.copies.start_fetch(buffer));
        let copies = copies.collect::<Result<_>>()?;
        Ok(Moving { copies, held })
    }

    fn fetch(&self, buckets: &mut Buckets, index: usize) -> Result<(Vec<Tensor>, MemoryGuard)> {
        let Moving { copies, held } = match buckets.ahead.take() {
            Some((ahead, moving)) if ahead == index => moving,
            other => {
                drop(other);
                self.start_fetch(buckets, index)?
            }
        };
        let tensors = copies.into_iter().map(HostCopy::wait);
        Ok((tensors.collect::<Result<_>>()?, held))
    }
}
