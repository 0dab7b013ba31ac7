//! What norms of rows share: the checks, the passes over the rows, and the sums over rows that are the gradients of
//! their parameters.

use crate::OpOutput;
use crate::chunks::{SUMMED_ROWS, rows_per_chunk, rows_per_partial, sum_partials};
use crate::filled::{filled, filled2};
use crate::host_floats::{HostFloats, one_dtype};
use crate::vectorised::vectorised;
use candle_core::{Result, Tensor, bail};

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

/// What `row(x, y)` makes of each row of `h` values, in the shape and dtype of `xs`.
pub(crate) fn forward(
    xs: &HostFloats,
    h: usize,
    row: impl Fn(&[f32], &mut [f32]) + Send + Sync,
) -> OpOutput {
    let x = xs.read();
    let chunk_len = rows_per_chunk(h) * h;
    let y = filled(x.len(), chunk_len, x.len(), |chunk, y| {
        let x = &x[chunk * chunk_len..][..y.len()];
        for (x, y) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)) {
            vectorised(
                #[inline(always)]
                || row(x, y),
            );
        }
    });
    OpOutput::rounded(y, xs.dtype(), xs.tensor().shape())
}

/// Inputs of a norm's backward on the CPU.
pub(crate) struct Backward {
    xs: HostFloats,
    weight: HostFloats,
    dy: HostFloats,
    residual: Option<HostFloats>,
}

/// A row of each input, and memory for one more; `w` is the same in all.
pub(crate) struct Row<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) w: &'a [f32],
    pub(crate) dy: &'a [f32],
    pub(crate) residual: Option<&'a [f32]>,
    pub(crate) scratch: &'a mut [f32],
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

    /// Calls `row(inputs, dx, sums)`, which writes `dx`, zeros so far, and adds to `num_sums` times `h` sums over the rows.
    /// Gives `dx` as a tensor, and the sums.
    pub(crate) fn run(
        &self,
        h: usize,
        num_sums: usize,
        row: impl Fn(Row<'_>, &mut [f32], &mut [f32]) + Send + Sync,
    ) -> (Tensor, Vec<f32>) {
        let (x, w, dy) = (self.xs.read(), self.weight.read(), self.dy.read());
        let residual = self.residual.as_ref().map(HostFloats::read);
        let rows = rows_per_partial(x.len() / h.max(1), h);
        let num_chunks = x.len().div_ceil((rows * h).max(1));
        let sums_len = num_sums * h;
        // Each chunk of dx needs its partner, though nothing is summed.
        let partial_len = sums_len.max(1);
        let sizes = [(x.len(), rows * h), (num_chunks * partial_len, partial_len)];
        let (dx, partials) = filled2(sizes[0], sizes[1], 2 * x.len(), |chunk, dx, sums| {
            let (mut block_sums, mut scratch) = (vec![0f32; sums_len], vec![0f32; h]);
            for (block, dx) in dx.chunks_mut(SUMMED_ROWS * h.max(1)).enumerate() {
                let first_row = chunk * rows + block * SUMMED_ROWS;
                for (i, dx) in dx.chunks_exact_mut(h).enumerate() {
                    let start = (first_row + i) * h;
                    let inputs = Row {
                        x: &x[start..][..h],
                        w: &w,
                        dy: &dy[start..][..h],
                        residual: residual.as_ref().map(|residual| &residual[start..][..h]),
                        scratch: &mut scratch,
                    };
                    vectorised(
                        #[inline(always)]
                        || row(inputs, dx, &mut block_sums),
                    );
                }
                for (sum, block_sum) in sums.iter_mut().zip(&mut block_sums) {
                    *sum += std::mem::take(block_sum);
                }
            }
        });
        let mut sums = vec![0f32; sums_len];
        sum_partials(&mut sums, true, &partials);
        let dx = OpOutput::rounded(dx, self.xs.dtype(), self.xs.tensor().shape());
        (dx.into_tensor(), sums)
    }
}

/// Replaces each `g` of `dx` by `finished(g, x)`, plus the residual's value if there is one.
#[inline(always)]
pub(crate) fn finish_dx(
    dx: &mut [f32],
    x: &[f32],
    residual: Option<&[f32]>,
    finished: impl Fn(f32, f32) -> f32,
) {
    match residual {
        Some(residual) => {
            for ((dx, x), residual) in dx.iter_mut().zip(x).zip(residual) {
                *dx = residual + finished(*dx, *x);
            }
        }
        None => {
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = finished(*dx, *x);
            }
        }
    }
}
