//! Layer normalisation: `y = (x - mean(x)) / sqrt(var(x) + eps) * w + b` (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

#[cfg(feature = "cuda")]
use crate::cuda::Norm;
use crate::dispatch::on_cuda;
use crate::element::{Element, by_float};
use crate::host_floats::{HostFloats, one_dtype};
use crate::lanes::{dot, sum};
use crate::row_norm::{self, Row};
use crate::{OpOutput, with_backward2, with_backward3};
use candle_core::{Result, Tensor, bail};

const NAME: &str = "layer_norm";

/// Takes from each row of `xs` its mean, divides it by its standard deviation, and scales it by `weight`; adds `bias`.
///
/// The variance is that of the population: the mean of the squares, not `h / (h - 1)` times it. The gradients of `weight`
/// and `bias` are computed only if they are tracked. Relative error against f64 about 6e-8, that of the gradients of `weight`
/// and `bias` 1e-7, and a mean far from zero costs none of it: see `docs/accuracy.md`.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)`, `bias (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// When `weight` or `bias` is not as long as the last dimension of `xs`, or a tensor is not f32, bf16 or f16, or two differ in
/// dtype or device.
pub fn layer_norm(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let y = forward(xs, weight, bias, eps)?;
    let (x, w) = (xs.detach(), weight.detach());
    let tracked = [weight.track_op(), bias.is_some_and(Tensor::track_op)];
    let x_tracked = xs.track_op();
    let grads = move |dy: &Tensor| {
        let (dx, parameters) = layer_norm_backward(&x, &w, dy, eps, None, tracked)?;
        // candle adds gradients in the dtype of what they belong to.
        let [dw, db] = parameters.map(|grad| grad.map(|grad| grad.to_dtype(w.dtype())));
        Ok((x_tracked.then_some(dx), dw.transpose()?, db.transpose()?))
    };
    match bias {
        Some(bias) => with_backward3(xs, weight, bias, y, NAME, grads),
        None => with_backward2(xs, weight, y, NAME, move |dy| {
            let (dx, dw, _) = grads(dy)?;
            Ok((dx, dw))
        }),
    }
}

/// [`layer_norm`] outside any graph.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)`, `bias (h)` -> `(.., h)`; one dtype.
///
/// # Errors
/// As [`layer_norm`].
pub fn layer_norm_forward(
    xs: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    Ok(forward(xs, weight, bias, eps)?.into_tensor())
}

/// Gradient of `xs`, plus `residual` if there is one, and those of the weight and the bias, each only if
/// `parameter_grads` says so; outside any graph.
///
/// `residual` is the gradient that reaches `xs` along the path around the norm; it is added in the same pass. The bias
/// itself is not needed.
///
/// # Shapes
/// `xs`, `dy` and `residual` `(.., h)`, `weight (h)`, of one dtype -> `(.., h)` in that dtype, and `(h)` in f32.
///
/// # Errors
/// When the shapes do not fit or a tensor is not f32, bf16 or f16, or two differ in dtype or device.
pub fn layer_norm_backward(
    xs: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    eps: f64,
    residual: Option<&Tensor>,
    parameter_grads: [bool; 2],
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let h = row_norm::backward_width(NAME, xs, weight, dy, residual)?;
    on_cuda!(xs => {
        crate::cuda::norm_backward(Norm::Layer, [xs, weight, dy], eps, residual, parameter_grads)
    });
    let inputs = row_norm::Backward::new(NAME, xs, weight, dy, residual)?;
    let _timer = crate::op_timer::op("layer_norm_backward");
    let [dw_len, db_len] = parameter_grads.map(|wanted| if wanted { h } else { 0 });
    let num_sums = parameter_grads.map(usize::from).iter().sum();
    let (dx, dw_and_db) = by_float!(inputs.dtype(), T => inputs.run::<T>(
        h,
        num_sums,
        #[inline(always)]
        |row, dx, sums| backward_row(row, eps, dx, sums.split_at_mut(dw_len)),
    ));
    let sums = [&dw_and_db[..dw_len], &dw_and_db[dw_len..][..db_len]];
    let grad = |i: usize| parameter_grads[i].then(|| Tensor::from_slice(sums[i], h, xs.device()));
    Ok((dx, [grad(0).transpose()?, grad(1).transpose()?]))
}

fn forward(xs: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<OpOutput> {
    let h = row_norm::width(NAME, xs, weight)?;
    if let Some(bias) = bias.filter(|bias| bias.dims() != [h]) {
        bail!("{NAME}: expected bias ({h}), got {:?}", bias.dims())
    }
    on_cuda!(xs => crate::cuda::norm_forward(Norm::Layer, xs, weight, bias, eps));
    let _timer = crate::op_timer::op("layer_norm_forward");
    let x = HostFloats::new(NAME, "xs", xs)?;
    let w = HostFloats::new(NAME, "weight", weight)?;
    one_dtype(NAME, &[("xs", &x), ("weight", &w)])?;
    let bias = bias.map(|bias| HostFloats::new(NAME, "bias", bias));
    let bias = bias.transpose()?;
    if let Some(bias) = &bias {
        one_dtype(NAME, &[("xs", &x), ("bias", bias)])?;
    }
    Ok(by_float!(x.dtype(), T => {
        let (w, b) = (w.read_as::<T>(), bias.as_ref().map(HostFloats::read_as));
        let y = row_norm::forward(
            &x.read_as::<T>(),
            h,
            #[inline(always)]
            |x, y, centred| forward_row((x, centred), &w, b.as_deref(), eps, y),
        );
        OpOutput::of(y, xs.shape())
    }))
}

/// Writes `x - mean(x)` to `centred`; gives `1 / sqrt(var(x) + eps)`.
#[inline(always)]
fn centre<T: Element>(x: &[T], eps: f64, centred: &mut [f32]) -> f32 {
    let mean = |sum: f32| (f64::from(sum) / x.len() as f64) as f32;
    let first = mean(sum(x, |x| x));
    for (centred, x) in centred.iter_mut().zip(x) {
        *centred = x.widen() - first;
    }
    // What the rounding of a large mean left.
    let rest = mean(sum(centred, |x| x));
    for centred in &mut *centred {
        *centred -= rest;
    }
    (1.0 / (f64::from(dot(centred, centred)) / x.len() as f64 + eps).sqrt()) as f32
}

#[inline(always)]
fn forward_row<T: Element>(
    (x, centred): (&[T], &mut [f32]),
    w: &[T],
    b: Option<&[T]>,
    eps: f64,
    y: &mut [T],
) {
    let r = centre(x, eps, centred);
    let values = y.iter_mut().zip(centred).zip(w);
    match b {
        Some(b) => {
            for (((y, centred), w), b) in values.zip(b) {
                *y = T::nearest(*centred * r * w.widen() + b.widen());
            }
        }
        None => {
            for ((y, centred), w) in values {
                *y = T::nearest(*centred * r * w.widen());
            }
        }
    }
}

/// With `c = x - mean(x)`, `n = c r` and `g = dy w`: `dx = r (g - mean(g) - n mean(g n))`, `dw = sum over rows of dy n`,
/// `db = sum over rows of dy`; what is not wanted of the last two is empty.
#[inline(always)]
fn backward_row<T: Element>(
    row: Row<'_, T>,
    eps: f64,
    dx: &mut [T],
    (dw, db): (&mut [f32], &mut [f32]),
) {
    let Row {
        x,
        w,
        dy,
        residual,
        scratch: [centred, g],
    } = row;
    let r = centre(x, eps, centred);
    for ((g, dy), w) in g.iter_mut().zip(dy).zip(w) {
        *g = dy.widen() * w.widen();
    }
    let len = x.len() as f32;
    let along_ones = sum(g, |g| g) / len;
    let along_x = r * r * dot(g, centred) / len;
    row_norm::finish_dx(
        dx,
        (g, centred),
        residual,
        #[inline(always)]
        |g, c| r * (g - along_ones - c * along_x),
    );
    for ((dw, dy), c) in dw.iter_mut().zip(dy).zip(&*centred) {
        *dw += dy.widen() * c * r;
    }
    for (db, dy) in db.iter_mut().zip(dy) {
        *db += dy.widen();
    }
}
