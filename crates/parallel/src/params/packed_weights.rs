//! Weights of linear layers that stay in the order in which products on the CPU read them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{DType, Result, Tensor};
use candle_ops::{LinearWeight, PackedWeight};

use super::released::{free_values, has_values};
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

/// Which weights of linear layers a rank keeps in the orders in which products on the CPU read them, so that not every product puts them in order: see
/// [`PackedWeight`]. Those that are trained are there as they are, too, frozen ones in these orders only, where they
/// [can be](PackedWeight::can_hold) and nothing but linear layers asks for them. Weights that replicas divide (ZeRO-3), that are offloaded, held in fewer
/// bits or on a GPU are not among them. Results have the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PackWeights {
    /// None.
    #[default]
    Off,
    /// Those that are frozen.
    Frozen,
    /// All of them: worth it where a weight is used several times between two updates, by several micro-batches or for what is computed again.
    All,
}

impl PackWeights {
    /// Whether a weight is kept so that is trained or not.
    pub(crate) fn includes(self, trainable: bool) -> bool {
        match self {
            Self::Off => false,
            Self::Frozen => !trainable,
            Self::All => true,
        }
    }
}

/// Bytes of a weight that stays packed, of values held as they are.
pub(crate) fn packed_bytes(dims: &[usize], dtype: DType) -> usize {
    match *dims {
        [num_out, num_in] => PackedWeight::num_bytes((num_out, num_in), dtype),
        _ => 0,
    }
}

/// Whether a weight that only linear layers ask for is nowhere else when it stays packed.
pub(crate) fn is_held_only(dims: &[usize], dtype: DType, trainable: bool) -> bool {
    !trainable && packed_bytes(dims, dtype) > 0 && PackedWeight::can_hold(dtype)
}

/// What the packed weights of a rank have in common.
#[derive(Debug, Default)]
pub(crate) struct PackedWeights {
    meter: OnceLock<MemoryMeter>,
    /// Whether the passes of a step are under way. Updates may still arrive in them, but each before its block runs: what was packed in these passes holds
    /// for them.
    in_passes: AtomicBool,
    /// Steps whose passes have begun; each may use other values of what is trained.
    num_steps: AtomicU64,
    num_writes: AtomicU64,
}

/// The passes of a step.
pub(crate) struct InPasses<'a>(&'a PackedWeights);

impl Drop for InPasses<'_> {
    fn drop(&mut self) {
        self.0.in_passes.store(false, Ordering::Relaxed);
    }
}

impl PackedWeights {
    /// Counts what is packed from now on.
    pub fn count_with(&self, meter: &MemoryMeter) {
        // A second model of the same store has the same weights.
        let _ = self.meter.set(meter.clone());
    }

    /// The passes of a step are under way until the result is dropped.
    pub fn in_passes(&self) -> InPasses<'_> {
        self.num_steps.fetch_add(1, Ordering::Relaxed);
        self.in_passes.store(true, Ordering::Relaxed);
        InPasses(self)
    }

    /// Weights were written, and not by the update of a step.
    pub fn forget(&self) {
        self.num_writes.fetch_add(1, Ordering::Relaxed);
    }
}

/// One weight that stays packed from its first product on, or from when its model is built on if it is held so only.
#[derive(Debug)]
pub(crate) struct KeptWeight {
    of_rank: Arc<PackedWeights>,
    trainable: bool,
    dims: (usize, usize),
    dtype: DType,
    /// `None` if products pack nothing.
    packed: OnceLock<Option<PackedWeight>>,
    /// Of its memory, while there is some.
    counted: Mutex<Option<MemoryGuard>>,
    /// The steps and writes before it was packed.
    packed_after: Mutex<u64>,
    /// Whether the values are to be nowhere else.
    is_only: AtomicBool,
}

impl KeptWeight {
    /// A weight of `dims` (out, in).
    pub fn new(
        of_rank: &Arc<PackedWeights>,
        dims: (usize, usize),
        dtype: DType,
        trainable: bool,
    ) -> Self {
        Self {
            of_rank: of_rank.clone(),
            trainable,
            dims,
            dtype,
            packed: OnceLock::new(),
            counted: Mutex::default(),
            packed_after: Mutex::default(),
            is_only: AtomicBool::new(false),
        }
    }

    /// Whether the values are to be here and nowhere else, where [`is_held_only`] allows it.
    pub fn set_only(&self, is_only: bool) {
        let dims = [self.dims.0, self.dims.1];
        let is_only = is_only && is_held_only(&dims, self.dtype, self.trainable);
        self.is_only.store(is_only, Ordering::Relaxed);
    }

    /// Packs the values of `param`, which layers captured, and frees them, if they are to be here only.
    pub fn take(&self, param: &Tensor) -> Result<()> {
        if !self.is_only.load(Ordering::Relaxed) || !has_values(param) {
            return Ok(());
        }
        let Some(packed) = self.packed() else {
            return Ok(());
        };
        packed.hold(param)?;
        free_values(param)
    }

    /// The values, if they are here only.
    pub fn values(&self) -> Result<Option<Tensor>> {
        match self.packed.get() {
            Some(Some(packed)) => packed.values(),
            _ => Ok(None),
        }
    }

    /// Whether the values are here only.
    pub fn has_values(&self) -> bool {
        let packed = self.packed.get().and_then(Option::as_ref);
        packed.is_some_and(PackedWeight::is_held)
    }

    /// Frees its memory, until the next product.
    pub fn free(&self) {
        if let Some(Some(packed)) = self.packed.get() {
            packed.free();
            *self.counted() = None;
        }
    }

    fn counted(&self) -> MutexGuard<'_, Option<MemoryGuard>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The packed form, which has memory from now on.
    fn packed(&self) -> Option<&PackedWeight> {
        let new = || PackedWeight::new(self.dims, self.dtype);
        let packed = self.packed.get_or_init(new).as_ref()?;
        if let Some(meter) = self.of_rank.meter.get() {
            let bytes = || PackedWeight::num_bytes(self.dims, self.dtype);
            let hold = || meter.hold(MemoryCategory::Packed, bytes());
            self.counted().get_or_insert_with(hold);
        }
        Some(packed)
    }

    /// The weight for a product now, of the parameter whose tensor this is.
    pub fn weight<'a>(&'a self, param: &'a Tensor) -> LinearWeight<'a> {
        let is_only = self.has_values();
        LinearWeight {
            values: (!is_only).then_some(param),
            packed: match is_only {
                true => self.packed(),
                false => self.copy(),
            },
        }
    }

    /// The packed form of values that are elsewhere, too: `None` if products pack nothing, and of a trained weight outside of the passes of a step.
    fn copy(&self) -> Option<&PackedWeight> {
        let of_rank = &self.of_rank;
        if self.trainable && !of_rank.in_passes.load(Ordering::Relaxed) {
            return None;
        }
        let packed = self.packed()?;
        let steps = match self.trainable {
            true => of_rank.num_steps.load(Ordering::Relaxed),
            false => 0,
        };
        // Both only grow.
        let now = steps + of_rank.num_writes.load(Ordering::Relaxed);
        let mut packed_after = (self.packed_after.lock()).unwrap_or_else(PoisonError::into_inner);
        if *packed_after != now {
            packed.forget();
            *packed_after = now;
        }
        Some(packed)
    }
}
