//! What norms of rows share: the checks, the passes over the rows, and the sums over rows that are the gradients of
//! their parameters.

use crate::cpu::chunks::{SUMMED_ROWS, rows_per_chunk, rows_per_partial, sum_partials};
use crate::cpu::element::{Element, by_float};
use crate::cpu::filled::{filled, filled2};
use crate::cpu::vectorised::vectorised;
use crate::host::floats::{HostFloats, one_dtype};
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::with_backward::with_backward;
use crate::timing::op_timer;
use candle_core::{Result, Tensor, bail};

/// A norm of rows. What it makes of a row must be marked `#[inline(always)]`.
pub(crate) trait RowNorm: 'static {
    /// What errors call it.
    const NAME: &'static str;
    /// What timelines call its passes.
    const FORWARD: &'static str;
    const BACKWARD: &'static str;
    #[cfg(feature = "cuda")]
    const ON_GPU: super::row_norm_gpu::Norm;

    /// Writes the norm of a row to `y`.
    fn forward_row<T: Element>(row: InputRow<'_, T>, eps: f64, y: &mut [T]);

    /// Writes the gradient of a row to `dx`, and adds to those of the weight and the bias; what is not wanted of these two is empty.
    fn backward_row<T: Element>(
        row: GradRow<'_, T>,
        eps: f64,
        dx: &mut [T],
        dw_and_db: [&mut [f32]; 2],
    );
}

/// A row of the input, the parameters, and memory for another row.
pub(crate) struct InputRow<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) w: &'a [T],
    pub(crate) b: Option<&'a [T]>,
    pub(crate) scratch: &'a mut [f32],
}

/// A row of each input of a backward pass, and memory for two more; `w` is the same in all.
pub(crate) struct GradRow<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) w: &'a [T],
    pub(crate) dy: &'a [T],
    pub(crate) residual: Option<&'a [T]>,
    pub(crate) scratch: [&'a mut [f32]; 2],
}

/// The norm as a node of candle's graph.
pub(crate) fn in_graph<N: RowNorm>(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let y = forward::<N>(xs, weight, bias, eps)?;
    let (x, w) = (xs.detach(), weight.detach());
    let x_tracked = xs.track_op();
    let tracked = [weight.track_op(), bias.is_some_and(Tensor::track_op)];
    let grads = move |dy: &Tensor| {
        let (dx, parameters) = backward::<N>([&x, &w, dy], eps, None, tracked)?;
        // candle adds gradients in the dtype of what they belong to.
        let [dw, db] = parameters.map(|grad| grad.map(|grad| grad.to_dtype(w.dtype())));
        Ok([x_tracked.then_some(dx), dw.transpose()?, db.transpose()?])
    };
    match bias {
        Some(bias) => with_backward([xs, weight, bias], y, N::NAME, grads),
        None => with_backward([xs, weight], y, N::NAME, move |dy| {
            let [dx, dw, _] = grads(dy)?;
            Ok([dx, dw])
        }),
    }
}

/// The norm of each row.
pub(crate) fn forward<N: RowNorm>(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<OpOutput> {
    let h = width(N::NAME, xs, weight)?;
    if let Some(bias) = bias.filter(|bias| bias.dims() != [h]) {
        bail!("{}: expected bias ({h}), got {:?}", N::NAME, bias.dims())
    }
    on_cuda!(xs => super::row_norm_gpu::norm_forward::<N>(xs, weight, bias, eps));
    let _timer = op_timer::op(N::FORWARD);
    let arguments = [("xs", xs), ("weight", weight)];
    let [x, w] = HostFloats::of_one_dtype(N::NAME, arguments)?;
    let bias = bias.map(|bias| HostFloats::new(N::NAME, "bias", bias));
    let bias = bias.transpose()?;
    if let Some(bias) = &bias {
        one_dtype(N::NAME, &[("xs", &x), ("bias", bias)])?;
    }
    Ok(by_float!(x.dtype(), T => {
        let (x, w) = (x.read_as::<T>(), w.read_as::<T>());
        let b = bias.as_ref().map(HostFloats::read_as);
        let (x, w, b) = (&*x, &*w, b.as_deref());
        let chunk_len = rows_per_chunk(h) * h;
        let y = filled(x.len(), chunk_len, x.len(), |chunk, y: &mut [T]| {
            let x = &x[chunk * chunk_len..][..y.len()];
            let mut scratch = vec![0f32; h];
            vectorised(
                #[inline(always)]
                || {
                    for (x, y) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)) {
                        let scratch = &mut scratch;
                        N::forward_row(InputRow { x, w, b, scratch }, eps, y);
                    }
                },
            );
        });
        OpOutput::of(y, xs.shape())
    }))
}

/// Of xs, weight and the gradient of the output: the gradient of `xs`, plus `residual`, and in f32 those of the weight and the bias that
/// `parameter_grads` asks for.
pub(crate) fn backward<N: RowNorm>(
    [xs, weight, dy]: [&Tensor; 3],
    eps: f64,
    residual: Option<&Tensor>,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    for (what, tensor) in [("the gradient", Some(dy)), ("residual", residual)] {
        if let Some(tensor) = tensor.filter(|tensor| tensor.dims() != xs.dims()) {
            bail!(
                "{}: expected {what} of the shape of xs {:?}, got {:?}",
                N::NAME,
                xs.dims(),
                tensor.dims()
            )
        }
    }
    let h = width(N::NAME, xs, weight)?;
    on_cuda!(xs => {
        super::row_norm_gpu::norm_backward::<N>([xs, weight, dy], eps, residual, parameter_grads)
    });
    let residual = residual.map(|residual| HostFloats::new(N::NAME, "residual", residual));
    let arguments = [("xs", xs), ("weight", weight), ("the gradient", dy)];
    let [x, w, dy] = HostFloats::of_one_dtype(N::NAME, arguments)?;
    let residual = residual.transpose()?;
    if let Some(residual) = &residual {
        one_dtype(N::NAME, &[("xs", &x), ("residual", residual)])?;
    }
    let _timer = op_timer::op(N::BACKWARD);
    let [dw_len, db_len] = parameter_grads.map(|wanted| if wanted { h } else { 0 });
    let sums_len = dw_len + db_len;
    let mut sums = vec![0f32; sums_len];
    let dx = by_float!(x.dtype(), T => {
        let (x, w, dy) = (x.read_as::<T>(), w.read_as::<T>(), dy.read_as::<T>());
        let residual = residual.as_ref().map(HostFloats::read_as::<T>);
        let (x, w, dy, residual) = (&*x, &*w, &*dy, residual.as_deref());
        let rows = rows_per_partial(x.len() / h.max(1), h);
        let num_chunks = x.len().div_ceil((rows * h).max(1));
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
                            let row = GradRow {
                                x: &x[start..][..h],
                                w,
                                dy: &dy[start..][..h],
                                residual: residual.map(|residual| &residual[start..][..h]),
                                scratch: [&mut *first, &mut *second],
                            };
                            let (dw, db) = block_sums.split_at_mut(dw_len);
                            N::backward_row(row, eps, dx, [dw, db]);
                        }
                    },
                );
                for (sum, block_sum) in sums.iter_mut().zip(&mut block_sums) {
                    *sum += std::mem::take(block_sum);
                }
            }
        };
        let (dx, partials) = filled2(sizes[0], sizes[1], 2 * x.len(), pass);
        sum_partials(&mut sums, true, &partials);
        OpOutput::of(dx, xs.shape()).into_tensor()
    });
    let (dw, db) = sums.split_at(dw_len);
    let grad = |sums, wanted: bool| wanted.then(|| Tensor::from_slice(sums, h, xs.device()));
    let [dw_wanted, db_wanted] = parameter_grads;
    let grads = [grad(dw, dw_wanted), grad(db, db_wanted)];
    let [dw, db] = grads.map(Option::transpose);
    Ok((dx, [dw?, db?]))
}

/// Length of a row of `xs (.., h)`; an error if `weight` is not `(h)`.
fn width(op: &str, xs: &Tensor, weight: &Tensor) -> Result<usize> {
    match xs.dims() {
        [.., h] if weight.dims() == [*h] => Ok(*h),
        dims => bail!(
            "{op}: expected xs (.., h) and weight (h), got xs {dims:?} and weight {:?}",
            weight.dims()
        ),
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
