//! Weights of linear layers in the orders in which products on the CPU read them, kept for many products.

#[cfg(target_arch = "x86_64")]
use super::kernels::{fill_panels, is_worth_it, new_panels, panel_bytes};
use super::matrix::Matrix;
#[cfg(target_arch = "x86_64")]
use super::panels::Panels;
#[cfg(not(target_arch = "x86_64"))]
use super::without_kernels::{Panels, fill_panels, is_worth_it, new_panels, panel_bytes};
use crate::cpu::element::{Element, by_float};
use crate::settings::product_choice::ProductSize;
use candle_core::DType;
use std::mem::replace;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

/// What a product with a weight is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WeightUse {
    Forward,
    InputGrad,
}

/// A weight (out, in) in the orders in which the forward pass and the gradient of the input read it: only the first product with it puts it in order, which
/// else each does (packing: Goto and van de Geijn, ACM TOMS 34, 2008).
///
/// Results have the same bits with and without. Whoever changes the weight says so by [`Self::forget`].
#[derive(Debug)]
pub struct PackedWeight([Mutex<Slot>; 2]);

#[derive(Debug)]
struct Slot {
    panels: Arc<Panels>,
    /// Whether they hold the weight's values.
    is_filled: bool,
}

impl PackedWeight {
    /// Room for a weight of `out` by `in` values of this type; `None` where products pack nothing: of other types than f32, bf16 and f16, on processors
    /// without AVX-512, and of very small weights.
    pub fn new((num_out, num_in): (usize, usize), dtype: DType) -> Option<Self> {
        let room = |num_k, cols| {
            let panels =
                is_float(dtype).then(|| by_float!(dtype, T => new_panels::<T>(num_k, cols)));
            Some(Mutex::new(Slot {
                panels: Arc::new(panels??),
                is_filled: false,
            }))
        };
        Some(Self([room(num_in, num_out)?, room(num_out, num_in)?]))
    }

    /// Bytes that [`Self::new`] takes; 0 if it gives none.
    pub fn num_bytes((num_out, num_in): (usize, usize), dtype: DType) -> usize {
        let bytes = |num_k, cols| {
            let bytes =
                is_float(dtype).then(|| by_float!(dtype, T => panel_bytes::<T>(num_k, cols)));
            bytes.flatten()
        };
        let both = bytes(num_in, num_out).zip(bytes(num_out, num_in));
        both.map_or(0, |(forward, input_grad)| forward + input_grad)
    }

    /// The weight has changed: the next product with it puts it in order again.
    pub fn forget(&self) {
        for slot in &self.0 {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.is_filled = false;
        }
    }

    /// This weight, the right matrix of a product of this size, or of a part of it along `k`; `None` if that does not read it so.
    pub(crate) fn panels<T: Element>(
        &self,
        which: WeightUse,
        size: ProductSize,
        right: Matrix<'_, T>,
    ) -> Option<Arc<Panels>> {
        if !is_worth_it::<T>(size.rows, size.cols) {
            return None;
        }
        // While another product puts it in order, of which this one may be a part, this one packs by itself.
        let mut slot = match self.0[which as usize].try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::Poisoned(slot)) => slot.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let was_filled = replace(&mut slot.is_filled, false);
        fill_panels(&mut slot.panels, was_filled, right, size);
        slot.is_filled = true;
        Some(slot.panels.clone())
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}
