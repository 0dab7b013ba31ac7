//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's layout: element `i` of a head is
//! paired with element `i + d/2`, and position `t` turns the pair by the angle `t * inv_freq[i]`.
//!
//! `y1 = x1 cos - x2 sin`, `y2 = x2 cos + x1 sin`; the backward is the rotation by the negative angle.

use crate::cpu::chunks::{for_each_chunk, rows_per_chunk};
use crate::cpu::element::{Element, by_float};
use crate::cpu::filled::copied;
use crate::cpu::vectorised::vectorised;
use crate::host::floats::HostFloats;
use crate::host::in_place::in_place;
use crate::host::on_cuda::on_cuda;
use crate::host::op_output::OpOutput;
use crate::host::values::Host;
use crate::host::with_backward::with_backward;
use candle_core::{Result, Tensor, bail};

pub(crate) const NAME: &str = "rope";

/// Which way [`rope_in_place`] turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeDirection {
    /// By the angles: the forward pass.
    Forward,
    /// By the negative angles: from the gradient of the output to that of the input.
    Backward,
}

/// Rotates each head of each position.
///
/// `cos` and `sin` get no gradient. Relative error against f64 about 4e-8, forward and backward: see
/// `docs/accuracy.md`.
///
/// # Shapes
/// `xs (b, t, h, d)`, `cos` and `sin` `(t, d/2)`, or `(b, t, d/2)` where sequences differ in positions, in f32 -> `(b, t, h, d)`, of the
/// dtype of `xs`.
///
/// # Errors
/// When the shapes do not fit, `d` is odd, or a tensor has another dtype or device.
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let y = turned(xs, cos, sin, RopeDirection::Forward)?;
    let (cos, sin) = (cos.detach(), sin.detach());
    with_backward([xs], y, NAME, move |dy| {
        let dx = turned(dy, &cos, &sin, RopeDirection::Backward)?;
        Ok([Some(dx.into_tensor())])
    })
}

fn turned(xs: &Tensor, cos: &Tensor, sin: &Tensor, direction: RopeDirection) -> Result<OpOutput> {
    let sizes = sizes(xs, cos, sin)?;
    on_cuda!(xs => super::rope_gpu::rope(xs, cos, sin, direction));
    let _timer = crate::timing::op_timer::op(NAME);
    let cos = Host::<f32>::new(NAME, "cos", cos)?;
    let sin = Host::<f32>::new(NAME, "sin", sin)?;
    let x = HostFloats::new(NAME, "xs", xs)?;
    Ok(by_float!(x.dtype(), T => {
        let mut y = copied(&x.read_as::<T>());
        rotate(&mut y, &cos.read(), &sin.read(), direction, sizes);
        OpOutput::of(y, xs.shape())
    }))
}

/// Rotates each head of each position in the storage of `xs`, outside any graph, and returns `xs`.
///
/// The caller must be the only owner of the values: every tensor that shares them changes too. They are copied first
/// only if they are not contiguous.
///
/// # Shapes
/// `xs (b, t, h, d)`, `cos` and `sin` `(t, d/2)`, or `(b, t, d/2)` where sequences differ in positions, in f32 -> `(b, t, h, d)`, of the
/// dtype of `xs`.
///
/// # Errors
/// When the shapes do not fit, `d` is odd, or a tensor has another dtype or device.
pub fn rope_in_place(
    xs: Tensor,
    cos: &Tensor,
    sin: &Tensor,
    direction: RopeDirection,
) -> Result<Tensor> {
    let sizes = sizes(&xs, cos, sin)?;
    on_cuda!(xs => super::rope_gpu::rope_in_place(xs, cos, sin, direction));
    let _timer = crate::timing::op_timer::op("rope_in_place");
    let cos = Host::<f32>::new(NAME, "cos", cos)?;
    let sin = Host::<f32>::new(NAME, "sin", sin)?;
    let (cos, sin) = (cos.read(), sin.read());
    by_float!(xs.dtype(), T => in_place::<T>(NAME, "xs", xs, |xs| {
        rotate(xs, &cos, &sin, direction, sizes);
    }))
}

/// `(t, h, d)` of inputs that fit.
fn sizes(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<(usize, usize, usize)> {
    let &[b, t, h, d] = xs.dims() else {
        bail!("{NAME}: expected xs (b, t, h, d), got {:?}", xs.dims())
    };
    if d % 2 != 0 {
        bail!(
            "{NAME}: the head dimension must be even, got {d} in xs {:?}",
            xs.dims()
        )
    }
    let is_one_for_all = cos.dims() == [t, d / 2];
    if !(is_one_for_all || cos.dims() == [b, t, d / 2]) || sin.dims() != cos.dims() {
        bail!(
            "{NAME}: expected cos and sin of shape [{t}, {0}] or [{b}, {t}, {0}] for xs {1:?}, got cos {2:?} and sin {3:?}\nhint: narrow the tables to the sequence length",
            d / 2,
            xs.dims(),
            cos.dims(),
            sin.dims()
        )
    }
    let num_angles = if is_one_for_all { t } else { b * t };
    Ok((num_angles, h, d))
}

fn rotate<T: Element>(
    x: &mut [T],
    cos: &[f32],
    sin: &[f32],
    direction: RopeDirection,
    (num_angles, h, d): (usize, usize, usize),
) {
    let (row, half, work) = (h * d, d / 2, x.len());
    if work == 0 {
        return;
    }
    let sign = match direction {
        RopeDirection::Forward => 1.0,
        RopeDirection::Backward => -1.0,
    };
    let rows = rows_per_chunk(row);
    for_each_chunk(x, rows * row, work, |chunk, x| {
        vectorised(
            #[inline(always)]
            || {
                for (i, x) in x.chunks_exact_mut(row).enumerate() {
                    let angles = (chunk * rows + i) % num_angles * half;
                    let (cos, sin) = (&cos[angles..][..half], &sin[angles..][..half]);
                    for x in x.chunks_exact_mut(d) {
                        turn(x.split_at_mut(half), cos, sin, sign);
                    }
                }
            },
        );
    });
}

/// Turns the pairs of one head by `sign` times the angles.
#[inline(always)]
fn turn<T: Element>((x1, x2): (&mut [T], &mut [T]), cos: &[f32], sin: &[f32], sign: f32) {
    let angles = cos.iter().zip(sin);
    for ((x1, x2), (cos, sin)) in x1.iter_mut().zip(x2).zip(angles) {
        let (sin, wide) = (sign * sin, (x1.widen(), x2.widen()));
        *x1 = T::nearest(wide.0 * cos - wide.1 * sin);
        *x2 = T::nearest(wide.1 * cos + wide.0 * sin);
    }
}
