//! Attention to some of the keys that a query sees, put together with that to others (as in ring attention, arXiv:2310.01889).
//!
//! With the outputs O and O', normalised each by its own keys, and the log-sum-exps L and L' of their scores:
//! `O + sigmoid(L' - L) (O' - O)`, and `L + softplus(L' - L)`, which never overflow. A query that saw no key yet has L of minus infinity.

#![allow(unsafe_code)]

use crate::cpu::chunks::for_each_chunk;
use crate::cpu::shared_buffer::SharedBuffer;
use crate::host::in_place::{must_not_share, try_write};
use crate::host::values::Host;
use candle_core::{DType, Result, Tensor, bail};

const NAME: &str = "merge_attention";

/// Adds attention to more keys, `more`, to that in `all`, in its storage: an output and the log-sum-exps of its scores each, as
/// [`attention_of_part`](crate::attention_of_part) gives them.
///
/// # Shapes
/// `(b, t, h, d)` and `(b, h, t)`, f32.
///
/// # Errors
/// Shapes, dtypes or devices that differ.
pub fn merge_attention(all: &(Tensor, Tensor), more: &(Tensor, Tensor)) -> Result<()> {
    let (b, t, h, d) = all.0.dims4()?;
    for (what, tensor, dims) in [
        ("the output", &more.0, &[b, t, h, d][..]),
        ("log_sum_exp", &all.1, &[b, h, t]),
        ("log_sum_exp", &more.1, &[b, h, t]),
    ] {
        if tensor.dims() != dims || tensor.dtype() != DType::F32 {
            bail!(
                "{NAME}: expected {what} {dims:?} in f32, got {:?} in {:?}",
                tensor.dims(),
                tensor.dtype()
            )
        }
    }
    must_not_share(NAME, &all.0, &more.0)?;
    must_not_share(NAME, &all.1, &more.1)?;
    must_not_share(NAME, &all.0, &all.1)?;
    if !all.0.device().is_cpu() {
        return merge_on_gpu(all, more);
    }
    let _timer = crate::timing::op_timer::op(NAME);
    let (out, lse) = (
        Host::<f32>::new(NAME, "the output", &more.0)?,
        Host::<f32>::new(NAME, "log_sum_exp", &more.1)?,
    );
    let (more_out, more_lse) = (out.read(), lse.read());
    let (len, num_rows) = (b * t * h * d, b * t * h);
    try_write(NAME, "the output", &all.0, len, |out: &mut [f32]| {
        try_write(
            NAME,
            "log_sum_exp",
            &all.1,
            num_rows,
            |lse: &mut [f32]| {
                let outputs = SharedBuffer::new(out);
                for_each_chunk(lse, t, len, |i, lse| {
                    let (b, head) = (i / h, i % h);
                    for (position, lse) in lse.iter_mut().enumerate() {
                        let more_lse = more_lse[i * t + position];
                        let Some(weight) = weight(*lse, more_lse) else {
                            continue;
                        };
                        let start = ((b * t + position) * h + head) * d;
                        let more = &more_out[start..][..d];
                        // SAFETY: each row of each head is visited once.
                        unsafe {
                            outputs.change_row(start, d, |out| {
                                for (out, more) in out.iter_mut().zip(more) {
                                    *out += weight * (more - *out);
                                }
                            });
                        }
                        *lse = log_sum_exp(*lse, more_lse);
                    }
                });
                Ok(())
            },
        )
    })
}

/// How much of the new output there is in the sum; `None` if it saw no key.
fn weight(lse: f32, more: f32) -> Option<f32> {
    match (lse, more) {
        (_, f32::NEG_INFINITY) => None,
        (f32::NEG_INFINITY, _) => Some(1.0),
        _ => Some(1.0 / (1.0 + (lse - more).exp())),
    }
}

/// ln(e^a + e^b), of which `b` is no minus infinity.
fn log_sum_exp(a: f32, b: f32) -> f32 {
    let (most, least) = if a > b { (a, b) } else { (b, a) };
    most + (least - most).exp().ln_1p()
}

/// The same by candle's operations.
fn merge_on_gpu(all: &(Tensor, Tensor), more: &(Tensor, Tensor)) -> Result<()> {
    let ((out, lse), (more_out, more_lse)) = (all, more);
    // Finite stand-ins for minus infinity: beside them everything else has all of the weight, and of two the output is 0.
    let floor = |lse: &Tensor| lse.maximum(f64::from(f32::MIN / 4.0));
    let (a, b) = (floor(lse)?, floor(more_lse)?);
    let most = a.maximum(&b)?;
    let sum = ((&a - &most)?.exp()? + (&b - &most)?.exp()?)?;
    let new_lse = (&most + sum.log()?)?;
    let weight = (&b - &new_lse)?.exp()?;
    let weight = weight.transpose(1, 2)?.contiguous()?.unsqueeze(3)?;
    let step = (more_out - out)?.broadcast_mul(&weight)?;
    crate::elementwise::elements::add_into(out, true, &step)?;
    crate::elementwise::elements::add_into(lse, false, &new_lse)
}
