//! Weights of linear layers that stay in the order in which products on the CPU read them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::DType;
use candle_ops::PackedWeight;

use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

/// Which weights of linear layers a rank keeps a second time, in the orders in which products on the CPU read them, so that not every product puts them in
/// order: see [`PackedWeight`]. Weights that replicas divide (ZeRO-3), that are offloaded, held in fewer bits or on a GPU are not among them. Results have the
/// same bits.
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

/// One weight that stays packed from its first product on.
#[derive(Debug)]
pub(crate) struct KeptWeight {
    of_rank: Arc<PackedWeights>,
    trainable: bool,
    dims: (usize, usize),
    dtype: DType,
    room: OnceLock<Option<Room>>,
    /// The steps and writes before it was packed.
    packed_after: Mutex<u64>,
}

#[derive(Debug)]
struct Room {
    packed: PackedWeight,
    _held: Option<MemoryGuard>,
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
            room: OnceLock::new(),
            packed_after: Mutex::default(),
        }
    }

    /// Its packed form, for a product now: `None` if products pack nothing, and of a trained weight outside of the passes of a step.
    pub fn get(&self) -> Option<&PackedWeight> {
        let of_rank = &self.of_rank;
        if self.trainable && !of_rank.in_passes.load(Ordering::Relaxed) {
            return None;
        }
        let room = self.room.get_or_init(|| {
            let packed = PackedWeight::new(self.dims, self.dtype)?;
            let bytes = PackedWeight::num_bytes(self.dims, self.dtype);
            let meter = of_rank.meter.get();
            let _held = meter.map(|meter| meter.hold(MemoryCategory::Packed, bytes));
            Some(Room { packed, _held })
        });
        let packed = &room.as_ref()?.packed;
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
