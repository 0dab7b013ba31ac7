//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's layout: element `i` of a head is
//! paired with element `i + d/2`, and position `t` turns the pair by the angle `t * inv_freq[i]`.
//!
//! `y1 = x1 cos - x2 sin`, `y2 = x2 cos + x1 sin`; the backward is the rotation by the negative angle.

use crate::chunks::{for_each_chunk, rows_per_chunk};
use crate::host::HostF32;
use crate::with_backward1;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "rope";

/// Rotates each head of each position.
///
/// `cos` and `sin` get no gradient.
///
/// # Shapes
/// `xs (b, t, h, d)`, `cos (t, d/2)`, `sin (t, d/2)` -> `(b, t, h, d)`; f32.
///
/// # Errors
/// When the shapes do not fit, `d` is odd, or a tensor is not f32 on the CPU.
pub fn rope(xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let &[_b, t, h, d] = xs.dims() else {
        bail!("{NAME}: expected xs (b, t, h, d), got {:?}", xs.dims())
    };
    if d % 2 != 0 {
        bail!(
            "{NAME}: the head dimension must be even, got {d} in xs {:?}",
            xs.dims()
        )
    }
    if cos.dims() != [t, d / 2] || sin.dims() != [t, d / 2] {
        bail!(
            "{NAME}: expected cos and sin of shape [{t}, {}] for xs {:?}, got cos {:?} and sin {:?}\nhint: narrow the tables to the sequence length",
            d / 2,
            xs.dims(),
            cos.dims(),
            sin.dims()
        )
    }
    let cos = HostF32::new(NAME, "cos", cos)?;
    let sin = HostF32::new(NAME, "sin", sin)?;
    let x = HostF32::new(NAME, "xs", xs)?;
    let y = rotate(&x.read(), &cos.read(), &sin.read(), 1.0, (t, h, d));
    with_backward1(xs, (y, xs.shape()), NAME, move |dy| {
        let dy = HostF32::new(NAME, "the gradient", dy)?;
        let dx = rotate(&dy.read(), &cos.read(), &sin.read(), -1.0, (t, h, d));
        Ok(Some(Tensor::from_vec(
            dx,
            dy.tensor().shape(),
            dy.tensor().device(),
        )?))
    })
}

/// Rotates by `direction` (1 or -1) times the angles.
fn rotate(
    x: &[f32],
    cos: &[f32],
    sin: &[f32],
    direction: f32,
    (t, h, d): (usize, usize, usize),
) -> Vec<f32> {
    let mut y = vec![0f32; x.len()];
    let (row, half) = (h * d, d / 2);
    let rows = rows_per_chunk(row);
    for_each_chunk(&mut y, rows * row, x.len(), |chunk, y| {
        let x = &x[chunk * rows * row..][..y.len()];
        for (i, (x, y)) in x.chunks_exact(row).zip(y.chunks_exact_mut(row)).enumerate() {
            let angles = (chunk * rows + i) % t * half;
            let (cos, sin) = (&cos[angles..][..half], &sin[angles..][..half]);
            for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
                let (x1, x2) = x.split_at(half);
                let (y1, y2) = y.split_at_mut(half);
                for ((y1, y2), ((x1, x2), (cos, sin))) in y1
                    .iter_mut()
                    .zip(y2)
                    .zip(x1.iter().zip(x2).zip(cos.iter().zip(sin)))
                {
                    let sin = direction * sin;
                    *y1 = x1 * cos - x2 * sin;
                    *y2 = x2 * cos + x1 * sin;
                }
            }
        }
    });
    y
}
