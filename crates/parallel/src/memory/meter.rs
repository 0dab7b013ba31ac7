//! Counters of the bytes that a rank holds, now and at their peak.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Result};

use super::allocated::{allocated_bytes, is_counted};
use super::category::MemoryCategory;
use super::report::{MemoryReport, MemoryUse};

/// The bytes that a rank holds. Clones share their counters; a rank's is [`Parameters::meter`](crate::Parameters::meter).
///
/// What holds memory keeps a [`MemoryGuard`] beside it.
#[derive(Clone, Debug, Default)]
pub struct MemoryMeter(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    of: [Counter; MemoryCategory::ALL.len()],
    /// What was allocated and not held when the passes of the step began.
    before_passes: AtomicI64,
    /// The most activations since then.
    peak_of_passes: AtomicU64,
    /// Whether activations of passes were measured, by whom it may be.
    are_passes_measured: AtomicBool,
    /// Actions of the lists since that was asked for, and the bytes held after each.
    recorded: Mutex<Option<Vec<(String, MemoryReport)>>>,
}

#[derive(Debug, Default)]
struct Counter {
    now: AtomicU64,
    peak: AtomicU64,
}

/// Bytes that count as held until this is dropped.
#[derive(Debug)]
#[must_use = "the bytes count until this is dropped"]
pub struct MemoryGuard {
    meter: MemoryMeter,
    category: MemoryCategory,
    bytes: u64,
}

impl MemoryMeter {
    /// Counts `bytes` until the result is dropped.
    pub fn hold(&self, category: MemoryCategory, bytes: usize) -> MemoryGuard {
        let (counter, bytes) = (self.counter(category), bytes as u64);
        let now = counter.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // What counts nothing leaves the peak alone: that of activations is known only when their passes have ended.
        if bytes > 0 {
            counter.peak.fetch_max(now, Ordering::Relaxed);
        }
        MemoryGuard {
            meter: self.clone(),
            category,
            bytes,
        }
    }

    /// What is held, and the most that was.
    pub fn report(&self) -> MemoryReport {
        MemoryReport::new(|category| {
            let counter = self.counter(category);
            MemoryUse {
                now: counter.now.load(Ordering::Relaxed),
                peak: counter.peak.load(Ordering::Relaxed),
            }
        })
        .with_activations(is_counted() || self.0.are_passes_measured.load(Ordering::Relaxed))
    }

    /// Notes from now on what is held after each thing that the rank does in a step: see [`Self::recorded`].
    pub fn record(&self) {
        *self.lock_recorded() = Some(Vec::new());
    }

    /// The actions of the rank since [`Self::record`], and the bytes held after each.
    pub fn recorded(&self) -> Vec<(String, MemoryReport)> {
        self.lock_recorded().take().unwrap_or_default()
    }

    /// An action has been done.
    pub(crate) fn note(&self, action: impl Debug) {
        if let Some(recorded) = &mut *self.lock_recorded() {
            recorded.push((format!("{action:?}"), self.report()));
        }
    }

    fn lock_recorded(&self) -> MutexGuard<'_, Option<Vec<(String, MemoryReport)>>> {
        let recorded = self.0.recorded.lock();
        recorded.unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, category: MemoryCategory) -> &Counter {
        &self.0.of[category as usize]
    }

    /// The passes of a step begin: what is allocated from now on and not held as something else is activations.
    pub(crate) fn begin_passes(&self, device: &Device) -> Result<()> {
        if let Some(bytes) = self.allocated_and_not_held(device)? {
            self.0.before_passes.store(bytes, Ordering::Relaxed);
            self.0.peak_of_passes.store(0, Ordering::Relaxed);
            self.0.are_passes_measured.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Counts activations, between two blocks' passes.
    pub(crate) fn count_activations(&self, device: &Device) -> Result<()> {
        if let Some(bytes) = self.allocated_and_not_held(device)? {
            let before = self.0.before_passes.load(Ordering::Relaxed);
            let bytes = (bytes - before).max(0) as u64;
            let counter = self.counter(MemoryCategory::Activations);
            counter.now.store(bytes, Ordering::Relaxed);
            self.0.peak_of_passes.fetch_max(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The passes of a step are over and the tape is empty: what they leave behind, as buffers that operations keep to use again, was
    /// no activations. A buffer that comes after a step's peak
    /// makes this peak seem lower; those of later steps are right.
    pub(crate) fn end_passes(&self, device: &Device) -> Result<()> {
        self.count_activations(device)?;
        let counter = self.counter(MemoryCategory::Activations);
        let left = counter.now.swap(0, Ordering::Relaxed);
        let peak = self.0.peak_of_passes.load(Ordering::Relaxed);
        let peak = peak.saturating_sub(left);
        counter.peak.fetch_max(peak, Ordering::Relaxed);
        Ok(())
    }

    fn allocated_and_not_held(&self, device: &Device) -> Result<Option<i64>> {
        let others = MemoryCategory::ALL.into_iter();
        let others = others
            .filter(|category| category.is_on_device() && *category != MemoryCategory::Activations);
        let held: u64 = others
            .map(|category| self.counter(category).now.load(Ordering::Relaxed))
            .sum();
        Ok(allocated_bytes(device)?.map(|bytes| bytes - held as i64))
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        let counter = self.meter.counter(self.category);
        counter.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use candle_core::{Device, Result};

    use super::{MemoryCategory, MemoryMeter};
    use crate::memory::{MemoryUse, count_memory_with};

    thread_local! {
        static ALLOCATED: Cell<i64> = const { Cell::new(1000) };
    }

    fn allocate(bytes: i64) {
        ALLOCATED.set(ALLOCATED.get() + bytes);
    }

    #[test]
    fn activations_are_what_passes_allocate_and_free_again_but_for_what_is_held() -> Result<()> {
        count_memory_with(|| ALLOCATED.get());
        let (meter, device) = (MemoryMeter::default(), Device::Cpu);
        let activations = || meter.report().of(MemoryCategory::Activations);
        let is_measured = || {
            meter
                .report()
                .measured(MemoryCategory::Activations)
                .is_some()
        };
        let staged = meter.hold(MemoryCategory::Buffers, 200);
        meter.begin_passes(&device)?;
        // An output, weights that were gathered for it, a buffer that stays, and one that goes.
        assert!(is_measured());
        allocate(100 + 30 + 7 - 200);
        drop(staged);
        let gathered = meter.hold(MemoryCategory::Gathered, 30);
        meter.count_activations(&device)?;
        assert_eq!(activations(), MemoryUse { now: 107, peak: 0 });
        allocate(-130);
        drop(gathered);
        meter.end_passes(&device)?;
        assert_eq!(activations(), MemoryUse { now: 0, peak: 100 });
        Ok(())
    }

    #[test]
    fn bytes_count_while_they_are_held_and_the_peak_stays() {
        let (meter, category) = (MemoryMeter::default(), MemoryCategory::Weights);
        let first = meter.hold(category, 30);
        let second = meter.clone().hold(category, 12);
        let other = meter.hold(MemoryCategory::Buffers, 5);
        drop(first);
        let third = meter.hold(category, 20);
        let held = |category| meter.report().of(category);
        assert_eq!(held(category), MemoryUse { now: 32, peak: 42 });
        drop((second, third, other));
        assert_eq!(held(category), MemoryUse { now: 0, peak: 42 });
        assert_eq!(held(MemoryCategory::Buffers), MemoryUse { now: 0, peak: 5 });
    }
}
