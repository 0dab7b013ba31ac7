//! Weights of linear layers in the orders in which products on the CPU read them, kept for many products.

use crate::ProductSize;
use crate::element::{Element, by_float};
use crate::host::Values;
use crate::host_floats::{HostFloats, two_dtypes};
use crate::linear::weight_dims;
use crate::matrix::{Factors, Matrix};
use crate::panel_rows::{PanelRows, PanelSource};
#[cfg(target_arch = "x86_64")]
use crate::product::{
    fill_panels, is_worth_it, new_panels, panel_bytes, panels_fit, panels_hold_values,
};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// What a product with a weight is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WeightUse {
    Forward,
    InputGrad,
}

impl WeightUse {
    /// The right matrix of the product, of the weight (out, in).
    fn right<T>(self, weight: Matrix<'_, T>) -> Matrix<'_, T> {
        match self {
            Self::Forward => weight.t(),
            Self::InputGrad => weight,
        }
    }
}

/// A weight (out, in) in the orders in which the forward pass and the gradient of the input read it: only the first product with it puts it in order, which
/// else each does (packing: Goto and van de Geijn, ACM TOMS 34, 2008).
///
/// Results have the same bits with and without. Whoever changes the weight says so by [`Self::forget`].
#[derive(Debug)]
pub struct PackedWeight {
    dims: (usize, usize),
    dtype: DType,
    slots: [Mutex<Slot>; 2],
    /// Whether the values may be nowhere else.
    is_held: AtomicBool,
}

#[derive(Debug)]
struct Slot {
    /// `None` while their memory is [freed](PackedWeight::free).
    panels: Option<Arc<Panels>>,
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
                panels: Some(Arc::new(panels??)),
                is_filled: false,
            }))
        };
        Some(Self {
            dims: (num_out, num_in),
            dtype,
            slots: [room(num_in, num_out)?, room(num_out, num_in)?],
            is_held: AtomicBool::new(false),
        })
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

    /// Whether weights of this type can be [held](Self::hold). Not f32 on processors with AMX: it multiplies three bf16 in the place of one f32 where that
    /// is faster.
    pub fn can_hold(dtype: DType) -> bool {
        is_float(dtype) && by_float!(dtype, T => panels_hold_values::<T>())
    }

    /// Puts values (out, in) in the order of the forward pass: they need not be anywhere else then, until [`Self::forget`].
    ///
    /// # Errors
    /// Values of another shape or type, and a type that [cannot be held](Self::can_hold).
    pub fn hold(&self, values: &Tensor) -> Result<()> {
        let op = "PackedWeight::hold";
        let (num_out, num_in) = self.dims;
        if values.dims() != [num_out, num_in]
            || values.dtype() != self.dtype
            || !Self::can_hold(self.dtype)
        {
            bail!(
                "{op}: a weight ({num_out}, {num_in}) of {:?} cannot be held from values {:?} of {:?}",
                self.dtype,
                values.shape(),
                values.dtype()
            )
        }
        let values = HostFloats::new(op, "values", values)?;
        let size = ProductSize {
            rows: usize::MAX,
            cols: num_out,
            num_k: num_in,
        };
        self.forget();
        by_float!(self.dtype, T => {
            let values = values.read_as::<T>();
            let values = Matrix::new(&values, num_out, num_in, num_in);
            let source = PanelSource::Matrix(WeightUse::Forward.right(values));
            self.slot(WeightUse::Forward).fill(&source, size);
        });
        self.is_held.store(true, Ordering::Release);
        Ok(())
    }

    /// The values (out, in) that [are held](Self::hold); `None` if none are.
    ///
    /// # Errors
    /// Those of making a tensor.
    pub fn values(&self) -> Result<Option<Tensor>> {
        let Some(rows) = self.held_rows() else {
            return Ok(None);
        };
        by_float!(self.dtype, T => {
            let values = rows.values::<T>(0..self.dims.0);
            Ok(Some(Tensor::from_vec(values, self.dims, &Device::Cpu)?))
        })
    }

    /// Whether values [are held](Self::hold).
    pub fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    /// The weight has changed: the next product with it puts it in order again. What was held is lost.
    pub fn forget(&self) {
        self.is_held.store(false, Ordering::Release);
        for which in [WeightUse::Forward, WeightUse::InputGrad] {
            self.slot(which).is_filled = false;
        }
    }

    /// [`Self::forget`] and frees the memory, until a product needs it.
    pub fn free(&self) {
        self.forget();
        for which in [WeightUse::Forward, WeightUse::InputGrad] {
            self.slot(which).panels = None;
        }
    }

    fn slot(&self, which: WeightUse) -> MutexGuard<'_, Slot> {
        let slot = self.slots[which as usize].lock();
        slot.unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows of the weight in the order of the forward pass, if they are held.
    fn held_rows(&self) -> Option<PanelRows> {
        let panels = || self.slot(WeightUse::Forward).panels.clone();
        let panels = self.is_held().then(panels)?;
        Some(PanelRows::new(panels?, self.dims))
    }

    /// This weight, the right matrix of a product of this size, or of a part of it along `k`; `None` if that does not read it so. `values` are those of the
    /// weight, if it is not held.
    fn panels<T: Element>(
        &self,
        which: WeightUse,
        size: ProductSize,
        values: Option<&HostFloats>,
    ) -> Option<Arc<Panels>> {
        if !is_worth_it::<T>(size.rows, size.cols) {
            return None;
        }
        // While another product puts it in order, of which this one may be a part, this one packs by itself.
        let mut slot = match self.slots[which as usize].try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::Poisoned(slot)) => slot.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let (num_out, num_in) = self.dims;
        let dims = match which {
            WeightUse::Forward => (num_in, num_out),
            WeightUse::InputGrad => (num_out, num_in),
        };
        let panels = slot.panels.as_ref().filter(|_| slot.is_filled);
        if let Some(panels) = panels.filter(|panels| panels_fit::<T>(panels, dims, size)) {
            return Some(panels.clone());
        }
        match (values, which) {
            (Some(values), _) => {
                let values = values.read_as::<T>();
                let values = Matrix::new(&values, num_out, num_in, num_in);
                Some(slot.fill(&PanelSource::Matrix(which.right(values)), size))
            }
            (None, WeightUse::InputGrad) => {
                let rows = self.held_rows()?;
                Some(slot.fill::<T>(&PanelSource::Rows(&rows), size))
            }
            (None, WeightUse::Forward) => None,
        }
    }
}

impl Slot {
    /// Puts a right matrix in the order in which a product of this size reads it.
    fn fill<T: Element>(&mut self, source: &PanelSource<'_, T>, size: ProductSize) -> Arc<Panels> {
        self.is_filled = false;
        let panels = fill_panels(self.panels.take(), source, size);
        self.is_filled = true;
        self.panels.insert(panels).clone()
    }
}

/// A weight (out, in) that a linear layer multiplies with, and its packed form, if there is one.
#[derive(Clone, Copy, Debug)]
pub struct LinearWeight<'a> {
    /// The values; `None` if the packed form [holds](PackedWeight::hold) them.
    pub values: Option<&'a Tensor>,
    /// The same ones in the orders in which products read them: of this very weight, as no product compares the two.
    pub packed: Option<&'a PackedWeight>,
}

impl<'a> From<&'a Tensor> for LinearWeight<'a> {
    fn from(values: &'a Tensor) -> Self {
        Self {
            values: Some(values),
            packed: None,
        }
    }
}

impl<'a> LinearWeight<'a> {
    /// Shape, (out, in).
    pub(crate) fn dims(self, op: &str) -> Result<(usize, usize)> {
        match (self.values, self.packed) {
            (Some(values), _) => weight_dims(op, values),
            (None, Some(packed)) => Ok(packed.dims),
            (None, None) => bail!("{op}: expected a weight, got neither values nor a packed form"),
        }
    }

    /// An error unless it is of the type of `what`.
    pub(crate) fn check_dtype(self, op: &str, what: &str, dtype: DType) -> Result<()> {
        let of_values = self.values.map(Tensor::dtype);
        let own = of_values.or(self.packed.map(|packed| packed.dtype));
        match own {
            Some(own) if own != dtype => Err(two_dtypes(op, (what, dtype), ("weight", own))),
            _ => Ok(()),
        }
    }

    /// The values, which are there on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(self, op: &str) -> Result<&'a Tensor> {
        match self.values {
            Some(values) => Ok(values),
            None => bail!("{op}: expected the values of a weight on a GPU, got a packed form"),
        }
    }

    /// Its rows, for a product of few rows, if the values are nowhere else.
    pub(crate) fn held_rows(self) -> Option<PanelRows> {
        match (self.values, self.packed) {
            (None, Some(packed)) => packed.held_rows(),
            _ => None,
        }
    }

    /// What a product of this size reads of it.
    pub(crate) fn right<T: Element>(
        self,
        op: &str,
        which: WeightUse,
        size: ProductSize,
    ) -> Result<RightWeight> {
        let values = self.values;
        let values = values.map(|values| HostFloats::new(op, "weight", values));
        let values = values.transpose()?;
        let panels =
            (self.packed).and_then(|packed| packed.panels::<T>(which, size, values.as_ref()));
        let values = match (values, self.packed) {
            (None, Some(packed)) if panels.is_none() => match packed.values()? {
                Some(values) => Some(HostFloats::new(op, "weight", &values)?),
                None => bail!("{op}: the values of a weight are not in memory"),
            },
            (values, _) => values,
        };
        Ok(RightWeight {
            dims: self.dims(op)?,
            which,
            panels,
            values,
        })
    }
}

/// The weight as a product reads it.
pub(crate) struct RightWeight {
    dims: (usize, usize),
    which: WeightUse,
    panels: Option<Arc<Panels>>,
    /// They are there if there are no panels.
    values: Option<HostFloats>,
}

impl RightWeight {
    /// The factors of a product of so many rows with it; `values` are what [`Self::read`] gave.
    pub(crate) fn factors<'a, T>(
        &'a self,
        lhs: &'a [T],
        rows: usize,
        values: Option<&'a [T]>,
    ) -> Factors<'a, T> {
        let (num_out, num_in) = self.dims;
        let values = match values {
            Some(values) => Matrix::new(values, num_out, num_in, num_in),
            None => Matrix::without_values(num_out, num_in),
        };
        let rhs = self.which.right(values);
        let lhs = Matrix::new(lhs, rows, rhs.rows, rhs.rows);
        let panels = self.panels.as_deref();
        Factors { lhs, rhs, panels }
    }

    /// The values, where panels do not stand for them.
    pub(crate) fn read<T: Element>(&self) -> Option<Values<'_, T>> {
        self.values.as_ref().map(HostFloats::read_as)
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

#[cfg(not(target_arch = "x86_64"))]
mod without_panels {
    use crate::ProductSize;
    use crate::element::Element;
    use crate::lines::Line;
    use crate::panel_rows::PanelSource;
    use std::sync::Arc;

    /// There are none on this processor.
    #[derive(Debug)]
    pub(crate) enum Panels {}

    pub(crate) fn new_panels<T: Element>(_num_k: usize, _cols: usize) -> Option<Panels> {
        None
    }

    pub(crate) fn panel_bytes<T: Element>(_num_k: usize, _cols: usize) -> Option<usize> {
        None
    }

    impl Panels {
        pub(crate) fn has_pairs(&self) -> bool {
            match *self {}
        }

        pub(crate) fn values_left(&self, _: usize) -> usize {
            match *self {}
        }

        pub(crate) fn lanes(&self, _: usize, _: usize, _: usize) -> &[Line] {
            match *self {}
        }
    }

    pub(crate) fn is_worth_it<T: Element>(_rows: usize, _cols: usize) -> bool {
        false
    }

    pub(crate) fn panels_hold_values<T: Element>() -> bool {
        false
    }

    pub(crate) fn panels_fit<T: Element>(_: &Panels, _: (usize, usize), _: ProductSize) -> bool {
        false
    }

    /// No product asks for it, as none [is worth it](is_worth_it).
    pub(crate) fn fill_panels<T: Element>(
        panels: Option<Arc<Panels>>,
        _: &PanelSource<'_, T>,
        _: ProductSize,
    ) -> Arc<Panels> {
        panels.unwrap_or_else(|| unreachable!("there are no panels on this processor"))
    }
}
#[cfg(target_arch = "x86_64")]
pub(crate) use crate::product::Panels;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use without_panels::Panels;
#[cfg(not(target_arch = "x86_64"))]
use without_panels::{
    fill_panels, is_worth_it, new_panels, panel_bytes, panels_fit, panels_hold_values,
};
