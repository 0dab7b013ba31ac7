//! What norms of rows share: the checks, the passes over the rows, and the sums over rows that are the gradients of
//! their parameters.

use crate::OpOutput;
use crate::chunks::{SUMMED_ROWS, rows_per_chunk, rows_per_partial, sum_partials};
use crate::element::Element;
use crate::filled::{filled, filled2};
use crate::host_floats::{HostFloats, one_dtype};
use crate::vectorised::vectorised;
use candle_core::{DType, Result, Tensor, bail};

/// Length of a row of `xs (.., h)`; an error if `weight` is not `(h)`.
pub(crate) fn width(op: &str, xs: &Tensor, weight: &Tensor) -> Result<usize> {
    match xs.dims() {
        [.., h] if weight.dims() == [*h] => Ok(*h),
        dims => bail!(
            "{op}: expected xs (.., h) and weight (h), got xs {dims:?} and weight {:?}",
            weight.dims()
        ),
    }
}

/// As [`width`], of the inputs of a backward; an error if one of the gradients has another shape than `xs`.
pub(crate) fn backward_width(
    op: &str,
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
) -> Result<usize> {
    for (what, tensor) in [("the gradient", Some(dy)), ("residual", residual)] {
        if let Some(tensor) = tensor.filter(|tensor| tensor.dims() != xs.dims()) {
            bail!(
                "{op}: expected {what} of the shape of xs {:?}, got {:?}",
                xs.dims(),
                tensor.dims()
            )
        }
    }
    width(op, xs, weight)
}

/// What `row(x, y, scratch)` makes of each row of `h` values; `scratch` is memory for `h` values.
pub(crate) fn forward<T: Element>(
    x: &[T],
    h: usize,
    row: impl Fn(&[T], &mut [T], &mut [f32]) + Send + Sync,
) -> Vec<T> {
    let chunk_len = rows_per_chunk(h) * h;
    filled(x.len(), chunk_len, x.len(), |chunk, y: &mut [T]| {
        let x = &x[chunk * chunk_len..][..y.len()];
        let mut scratch = vec![0f32; h];
        vectorised(
            #[inline(always)]
            || {
                for (x, y) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)) {
                    row(x, y, &mut scratch);
                }
            },
        );
    })
}

/// Inputs of a norm's backward on the CPU.
pub(crate) struct Backward {
    xs: HostFloats,
    weight: HostFloats,
    dy: HostFloats,
    residual: Option<HostFloats>,
}

/// A row of each input, and memory for two more; `w` is the same in all.
pub(crate) struct Row<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) w: &'a [T],
    pub(crate) dy: &'a [T],
    pub(crate) residual: Option<&'a [T]>,
    pub(crate) scratch: [&'a mut [f32]; 2],
}

impl Backward {
    /// Of tensors with shapes that fit.
    pub(crate) fn new(
        op: &str,
        xs: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Self> {
        let residual = residual.map(|residual| HostFloats::new(op, "residual", residual));
        let inputs = Self {
            xs: HostFloats::new(op, "xs", xs)?,
            weight: HostFloats::new(op, "weight", weight)?,
            dy: HostFloats::new(op, "the gradient", dy)?,
            residual: residual.transpose()?,
        };
        let Self {
            xs,
            weight,
            dy,
            residual,
        } = &inputs;
        one_dtype(op, &[("xs", xs), ("weight", weight), ("the gradient", dy)])?;
        if let Some(residual) = residual {
            one_dtype(op, &[("xs", xs), ("residual", residual)])?;
        }
        Ok(inputs)
    }

    /// Of all inputs.
    pub(crate) fn dtype(&self) -> DType {
        self.xs.dtype()
    }

    /// Calls `row(inputs, dx, sums)`, which writes `dx` and adds to `num_sums` times `h` sums over the rows. Gives `dx` as a
    /// tensor, and the sums.
    pub(crate) fn run<T: Element>(
        &self,
        h: usize,
        num_sums: usize,
        row: impl Fn(Row<'_, T>, &mut [T], &mut [f32]) + Send + Sync,
    ) -> (Tensor, Vec<f32>) {
        let (x, w, dy) = (self.xs.read_as(), self.weight.read_as(), self.dy.read_as());
        let residual = self.residual.as_ref().map(HostFloats::read_as);
        let (x, w, dy, residual) = (&*x, &*w, &*dy, residual.as_deref());
        let rows = rows_per_partial(x.len() / h.max(1), h);
        let num_chunks = x.len().div_ceil((rows * h).max(1));
        let sums_len = num_sums * h;
        // Each chunk of dx needs its partner, though nothing is summed.
        let partial_len = sums_len.max(1);
        let sizes = [(x.len(), rows * h), (num_chunks * partial_len, partial_len)];
        let pass = |chunk: usize, dx: &mut [T], sums: &mut [f32]| {
            let (mut block_sums, mut scratch) = (vec![0f32; sums_len], vec![0f32; 2 * h]);
            let (first, second) = scratch.split_at_mut(h);
            for (block, dx) in dx.chunks_mut(SUMMED_ROWS * h.max(1)).enumerate() {
                let first_row = chunk * rows + block * SUMMED_ROWS;
                vectorised(
                    #[inline(always)]
                    || {
                        for (i, dx) in dx.chunks_exact_mut(h).enumerate() {
                            let start = (first_row + i) * h;
                            let inputs = Row {
                                x: &x[start..][..h],
                                w,
                                dy: &dy[start..][..h],
                                residual: residual.map(|residual| &residual[start..][..h]),
                                scratch: [&mut *first, &mut *second],
                            };
                            row(inputs, dx, &mut block_sums);
                        }
                    },
                );
                for (sum, block_sum) in sums.iter_mut().zip(&mut block_sums) {
                    *sum += std::mem::take(block_sum);
                }
            }
        };
        let (dx, partials) = filled2(sizes[0], sizes[1], 2 * x.len(), pass);
        let mut sums = vec![0f32; sums_len];
        sum_partials(&mut sums, true, &partials);
        let dx = OpOutput::of(dx, self.xs.tensor().shape());
        (dx.into_tensor(), sums)
    }
}

/// Writes `finished(g, x)` of each value of `g`, plus the residual's value if there is one, to `dx`.
#[inline(always)]
pub(crate) fn finish_dx<T: Element, X: Element>(
    dx: &mut [T],
    (g, x): (&[f32], &[X]),
    residual: Option<&[T]>,
    finished: impl Fn(f32, f32) -> f32,
) {
    let values = dx.iter_mut().zip(g).zip(x);
    match residual {
        Some(residual) => {
            for (((dx, g), x), residual) in values.zip(residual) {
                *dx = T::nearest(residual.widen() + finished(*g, x.widen()));
            }
        }
        None => {
            for ((dx, g), x) in values {
                *dx = T::nearest(finished(*g, x.widen()));
            }
        }
    }
}
