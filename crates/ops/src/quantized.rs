//! Blockwise int8 quantization, for values that travel between ranks (ZeRO++, Wang et al. 2023, arXiv:2306.10209).
//!
//! A row of values is cut into blocks of [`BLOCK`], the last one shorter. A block's packed form is its scale
//! `s = max|x| / 127` as f32 (little endian), then its codes `round(x / s)` to the nearest, ties to even, as i8. Zeros fill a row up to
//! a multiple of 4 bytes. So a row of many values takes 260 bytes for 256 of them, 0.254 of their f32. A value comes back as
//! `code s`, off by at most s / 2. `s` is at least the smallest normal number, so values below 1e-38 may become zeros. A
//! block with a NaN or an infinity has the scale NaN, so all of it comes back as NaN. The same bits on every device.

use crate::chunks::{for_each_chunk, rows_per_chunk};
use crate::dispatch::on_cuda;
use crate::element::{Element, by_float};
use crate::host::HostU8;
use crate::host_floats::HostFloats;
use crate::in_place::in_place;
use crate::lanes;
use crate::vectorised::vectorised;
use candle_core::{Device, Result, Tensor, bail};

/// Values that share a scale.
const BLOCK: usize = 256;
/// Bytes of a scale.
const SCALE_BYTES: usize = size_of::<f32>();
/// Bytes of a whole block.
const BLOCK_BYTES: usize = SCALE_BYTES + BLOCK;
/// The largest code.
const MAX_CODE: f32 = 127.0;
/// The largest scale, whose largest multiple is finite: the quotient itself is rounded up.
const MAX_SCALE: f32 = (f32::MAX / MAX_CODE).next_down();
/// Added to a value of at most 2^22, it leaves no bits for fractions: the lowest 8 bits of the sum are the nearest integer's.
const ROUNDER: f32 = 1.5 * (1 << 23) as f32;

/// Bytes of the packed form of a row of `len` values, a multiple of 4.
pub const fn quantized_bytes(len: usize) -> usize {
    (len + len.div_ceil(BLOCK) * SCALE_BYTES).next_multiple_of(4)
}

/// The packed form of each row, whatever the other rows are; outside any graph.
///
/// # Shapes
/// `xs (.., len)`, f32, bf16 or f16 -> u8 `(.., quantized_bytes(len))`.
///
/// # Errors
/// When `xs` is a scalar or not f32, bf16 or f16.
pub fn quantize_int8(xs: &Tensor) -> Result<Tensor> {
    let op = "quantize_int8";
    let (rows, len) = rows_of(op, "xs", xs)?;
    let mut shape = xs.dims().to_vec();
    shape.pop();
    shape.push(quantized_bytes(len));
    on_cuda!(xs => crate::cuda::quantize_int8(xs, [rows, len], shape));
    let _timer = crate::op_timer::op(op);
    let xs = HostFloats::new(op, "xs", xs)?;
    let row_bytes = quantized_bytes(len);
    let mut packed = vec![0u8; rows * row_bytes];
    by_float!(xs.dtype(), T => if len > 0 {
        let (packed, xs) = (packed.chunks_exact_mut(row_bytes), xs.read_as::<T>());
        for (packed, xs) in packed.zip(xs.chunks_exact(len)) {
            quantize_row(packed, xs);
        }
    });
    Tensor::from_vec(packed, shape, &Device::Cpu)
}

/// Writes, or adds if `add`, the values of packed rows to `dst`, in f32, rounded once to the dtype of `dst`; outside any graph.
///
/// # Shapes
/// `dst (.., len)`, f32, bf16 or f16, contiguous; `packed`, u8, `(.., quantized_bytes(len))` with the same rows.
///
/// # Errors
/// When the shapes differ from that, or a tensor has another dtype, device or layout.
pub fn dequantize_int8_into(dst: &Tensor, add: bool, packed: &Tensor) -> Result<()> {
    let op = "dequantize_int8_into";
    let (rows, len) = rows_of(op, "dst", dst)?;
    let (got_rows, bytes) = rows_of(op, "packed", packed)?;
    if (got_rows, bytes) != (rows, quantized_bytes(len)) {
        bail!(
            "{op}: expected packed of {rows} rows of {} bytes for dst of {rows} rows of {len} values, got {got_rows} of {bytes}",
            quantized_bytes(len)
        )
    }
    dequantize(op, dst, add, packed, [1, len])
}

/// Writes, or adds if `add`, the sum of the values of packed rows to `dst`: in f32, `dst` first and then row by row, rounded
/// once to the dtype of `dst`; outside any graph.
///
/// # Shapes
/// `dst (len)`, f32, bf16 or f16, contiguous; `packed`, u8, `(rows, quantized_bytes(len))`, of at least one row.
///
/// # Errors
/// When the shapes differ from that, or a tensor has another dtype, device or layout.
pub fn dequantize_int8_sum_into(dst: &Tensor, add: bool, packed: &Tensor) -> Result<()> {
    let op = "dequantize_int8_sum_into";
    let len = dst.elem_count();
    let bytes = quantized_bytes(len);
    match packed.dims() {
        [rows, got] if *rows > 0 && *got == bytes => dequantize(op, dst, add, packed, [*rows, len]),
        dims => bail!(
            "{op}: expected packed (rows, {bytes}) with at least one row for dst of {len} values, got {dims:?}"
        ),
    }
}

/// Each row of `len` values of `dst` gets the sum of the next `num_summed` rows of `packed`.
fn dequantize(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    packed: &Tensor,
    [num_summed, len]: [usize; 2],
) -> Result<()> {
    if dst.elem_count() == 0 {
        return Ok(());
    }
    on_cuda!(dst => crate::cuda::dequantize_int8(op, dst, add, packed, [num_summed, len]));
    let _timer = crate::op_timer::op(op);
    let packed = HostU8::new(op, "packed", packed)?;
    let packed = packed.read();
    if !dst.is_contiguous() {
        bail!(
            "{op}: dst must be contiguous, got strides {:?}",
            dst.stride()
        )
    }
    let summed_bytes = num_summed * quantized_bytes(len);
    by_float!(dst.dtype(), T => in_place::<T>(op, "dst", dst.clone(), |dst| {
        let packed = packed.chunks_exact(summed_bytes);
        for (dst, packed) in dst.chunks_exact_mut(len).zip(packed) {
            sum_rows(dst, add, packed);
        }
    }))?;
    Ok(())
}

fn quantize_row<T: Element>(packed: &mut [u8], xs: &[T]) {
    let blocks = rows_per_chunk(BLOCK);
    for_each_chunk(packed, blocks * BLOCK_BYTES, xs.len(), |chunk, packed| {
        let xs = &xs[(chunk * blocks * BLOCK).min(xs.len())..];
        vectorised(
            #[inline(always)]
            || {
                for (packed, xs) in packed.chunks_mut(BLOCK_BYTES).zip(xs.chunks(BLOCK)) {
                    quantize_block(packed, xs);
                }
            },
        );
    });
}

#[inline(always)]
fn quantize_block<T: Element>(packed: &mut [u8], xs: &[T]) {
    let (scale_bytes, codes) = packed.split_at_mut(SCALE_BYTES);
    let max = lanes::max(xs, f32::abs);
    if !max.is_finite() {
        scale_bytes.copy_from_slice(&f32::NAN.to_le_bytes());
        return;
    }
    let scale = (max / MAX_CODE).clamp(f32::MIN_POSITIVE, MAX_SCALE);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    let inverse = 1.0 / scale;
    for (code, x) in codes.iter_mut().zip(xs) {
        *code = (x.widen() * inverse + ROUNDER).to_bits() as u8;
    }
}

/// `dst` = the sum of the rows of `packed`, after what `dst` is if `add`.
fn sum_rows<T: Element>(dst: &mut [T], add: bool, packed: &[u8]) {
    let row_bytes = quantized_bytes(dst.len());
    let blocks = rows_per_chunk(BLOCK);
    for_each_chunk(dst, blocks * BLOCK, packed.len(), |chunk, dst| {
        vectorised(
            #[inline(always)]
            || {
                for (block, dst) in dst.chunks_mut(BLOCK).enumerate() {
                    let start = (chunk * blocks + block) * BLOCK_BYTES;
                    let mut sums = [0f32; BLOCK];
                    let sums = &mut sums[..dst.len()];
                    if add {
                        for (sum, dst) in sums.iter_mut().zip(&*dst) {
                            *sum = dst.widen();
                        }
                    }
                    for (row, packed) in packed.chunks_exact(row_bytes).enumerate() {
                        add_block(sums, add || row > 0, &packed[start..]);
                    }
                    for (dst, sum) in dst.iter_mut().zip(sums) {
                        *dst = T::nearest(*sum);
                    }
                }
            },
        );
    });
}

#[inline(always)]
fn add_block(dst: &mut [f32], add: bool, packed: &[u8]) {
    let (scale, codes) = packed.split_at(SCALE_BYTES);
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    let values = codes
        .iter()
        .map(|code| f32::from(code.cast_signed()) * scale);
    if add {
        for (dst, value) in dst.iter_mut().zip(values) {
            *dst += value;
        }
    } else {
        for (dst, value) in dst.iter_mut().zip(values) {
            *dst = value;
        }
    }
}

/// Number of rows along the last dim, and their length.
fn rows_of(op: &str, what: &str, tensor: &Tensor) -> Result<(usize, usize)> {
    match tensor.dims().split_last() {
        Some((len, rows)) => Ok((rows.iter().product(), *len)),
        None => bail!("{op}: expected {what} (.., len), got a scalar"),
    }
}
