//! Root-mean-square normalisation: `y = x / sqrt(mean(x^2) + eps) * w` (Zhang and Sennrich 2019, arXiv:1910.07467).

use crate::chunks::{
    for_each_chunk, for_each_chunk2, rows_per_chunk, rows_per_partial, sum_partials,
};
use crate::host::HostF32;
use crate::lanes::dot;
use crate::with_backward2;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "rms_norm";

/// Normalises each row of `xs` by its root mean square and scales it by `weight`, as Hugging Face's Llama does.
///
/// The gradient of `weight` is computed only if `weight` is tracked.
///
/// # Shapes
/// `xs (.., h)`, `weight (h)` -> `(.., h)`; f32.
///
/// # Errors
/// When `weight` is not as long as the last dimension of `xs`, or a tensor is not f32 on the CPU.
pub fn rms_norm(xs: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let h = match xs.dims() {
        [.., h] if weight.dims() == [*h] => *h,
        dims => bail!(
            "{NAME}: expected xs (.., h) and weight (h), got xs {dims:?} and weight {:?}",
            weight.dims()
        ),
    };
    let x = HostF32::new(NAME, "xs", xs)?;
    let w = HostF32::new(NAME, "weight", weight)?;
    let y = forward(&x.read(), &w.read(), h, eps);
    let (x_tracked, w_tracked) = (xs.track_op(), weight.track_op());
    with_backward2(xs, weight, (y, xs.shape()), NAME, move |dy| {
        let dy = HostF32::new(NAME, "the gradient", dy)?;
        let (dx, dw) = backward(&x.read(), &w.read(), &dy.read(), h, eps, w_tracked);
        let dx = x_tracked.then(|| Tensor::from_vec(dx, x.tensor().shape(), dy.tensor().device()));
        let dw = w_tracked.then(|| Tensor::from_vec(dw, h, dy.tensor().device()));
        Ok((dx.transpose()?, dw.transpose()?))
    })
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
fn inverse_rms(x: &[f32], eps: f64) -> f32 {
    (1.0 / (dot(x, x) as f64 / x.len() as f64 + eps).sqrt()) as f32
}

fn forward(x: &[f32], w: &[f32], h: usize, eps: f64) -> Vec<f32> {
    let mut y = vec![0f32; x.len()];
    let chunk_len = rows_per_chunk(h) * h;
    for_each_chunk(&mut y, chunk_len, x.len(), |chunk, y| {
        let x = &x[chunk * chunk_len..][..y.len()];
        for (x, y) in x.chunks_exact(h).zip(y.chunks_exact_mut(h)) {
            let r = inverse_rms(x, eps);
            for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                *y = x * r * w;
            }
        }
    });
    y
}

/// With `n = x r` and `g = dy w`: `dx = r (g - n mean(g n))`, `dw = sum over rows of dy n`.
fn backward(
    x: &[f32],
    w: &[f32],
    dy: &[f32],
    h: usize,
    eps: f64,
    w_tracked: bool,
) -> (Vec<f32>, Vec<f32>) {
    let mut dx = vec![0f32; x.len()];
    let rows = rows_per_partial(x.len() / h.max(1), h);
    let num_chunks = x.len().div_ceil((rows * h).max(1));
    let mut partials = vec![0f32; num_chunks * h];
    let work = 2 * x.len();
    for_each_chunk2(
        (&mut dx, rows * h),
        (&mut partials, h),
        work,
        |chunk, dx, dw| {
            let start = chunk * rows * h;
            let x = x[start..][..dx.len()].chunks_exact(h);
            let dy = dy[start..][..dx.len()].chunks_exact(h);
            for ((x, dy), dx) in x.zip(dy).zip(dx.chunks_exact_mut(h)) {
                let r = inverse_rms(x, eps);
                for ((g, dy), w) in dx.iter_mut().zip(dy).zip(w) {
                    *g = dy * w;
                }
                let along_x = r * r * dot(dx, x) / h as f32;
                for (dx, x) in dx.iter_mut().zip(x) {
                    *dx = r * (*dx - x * along_x);
                }
                if w_tracked {
                    for ((dw, dy), x) in dw.iter_mut().zip(dy).zip(x) {
                        *dw += dy * x * r;
                    }
                }
            }
        },
    );
    (dx, sum_partials(&partials, h))
}
