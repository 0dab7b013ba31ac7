//! Blockwise int8 and int4, for values that travel between ranks (ZeRO++, Wang et al. 2023, arXiv:2306.10209).
//!
//! A row of values is cut into blocks of [`BLOCK`], the last one shorter. A block's packed form is its scale
//! `s = max|x| / m` as f32 (little endian), then its codes `round(x / s)` to the nearest, ties to even. In int8 `m` is 127, and a code is
//! an i8. In int4 `m` is 7, and a byte has two codes: the lower half that of one of the first 128 values, the upper half that of the one 128
//! values later, if there is one. Zeros fill a row up to a multiple of 4 bytes. So a row of many values takes 260 or 132 bytes for 256 of
//! them, 0.254 or 0.129 of their f32. A value comes back as `code s`, off by at most s / 2. `s` is at least the smallest normal number, so
//! values below 1e-38 may become zeros. A block with a NaN or an infinity has the scale NaN, so all of it comes back as NaN. The same bits on
//! every device.

use crate::cpu::chunks::{for_each_chunk, rows_per_chunk};
use crate::cpu::element::{Element, by_float};
use crate::cpu::lanes;
use crate::cpu::vectorised::vectorised;
use crate::host::floats::HostFloats;
use crate::host::in_place::in_place;
use crate::host::on_cuda::on_cuda;
use crate::host::values::Host;
use candle_core::{Device, Result, Tensor, bail};

/// Values that share a scale.
const BLOCK: usize = 256;
/// Bytes of a scale.
const SCALE_BYTES: usize = size_of::<f32>();
/// Values of a block whose codes are in the lower half of a byte, in int4.
const HALF: usize = BLOCK / 2;
/// Added to a value of at most 2^22, it leaves no bits for fractions: the lowest bits of the sum are the nearest integer's.
const ROUNDER: f32 = 1.5 * (1 << 23) as f32;

/// In how many bits a value is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedType {
    /// 8, and a scale for 256 values.
    Int8,
    /// 4, and a scale for 256 values.
    Int4,
}

impl QuantizedType {
    /// Values that share a scale. The last block of a row may be shorter.
    pub const BLOCK: usize = BLOCK;

    /// Bytes of the packed form of a row of `len` values, a multiple of 4.
    pub const fn row_bytes(self, len: usize) -> usize {
        let (whole, rest) = (len / BLOCK * self.block_bytes(BLOCK), len % BLOCK);
        let rest = if rest == 0 { 0 } else { self.block_bytes(rest) };
        (whole + rest).next_multiple_of(4)
    }

    /// Of a block of `len` values.
    const fn block_bytes(self, len: usize) -> usize {
        let codes = match self {
            Self::Int4 if len > HALF => HALF,
            Self::Int8 | Self::Int4 => len,
        };
        SCALE_BYTES + codes
    }

    /// The largest code.
    const fn max_code(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
        }
    }

    /// The largest scale, whose multiple by the largest code is finite: the quotient itself may be rounded up.
    const fn max_scale(self) -> f32 {
        (f32::MAX / self.max_code()).next_down()
    }
}

/// The packed form of each row, whatever the other rows are; outside any graph.
///
/// # Shapes
/// `xs (.., len)`, f32, bf16 or f16 -> u8 `(.., row_bytes(len))`.
///
/// # Errors
/// When `xs` is a scalar or not f32, bf16 or f16.
pub fn quantize_rows(xs: &Tensor, to: QuantizedType) -> Result<Tensor> {
    let (rows, len) = rows_of("quantize_rows", "xs", xs)?;
    let mut shape = xs.dims().to_vec();
    shape.pop();
    shape.push(to.row_bytes(len));
    quantize("quantize_rows", xs, to, [rows, 1, len], shape)
}

/// [`quantize_rows`], with the first two dims of the result exchanged.
///
/// # Shapes
/// `xs (a, b, len)`, f32, bf16 or f16 -> u8 `(b, a, row_bytes(len))`.
///
/// # Errors
/// When `xs` has another number of dims or is not f32, bf16 or f16.
pub fn quantize_rows_transposed(xs: &Tensor, to: QuantizedType) -> Result<Tensor> {
    let (a, b, len) = xs.dims3()?;
    let shape = vec![b, a, to.row_bytes(len)];
    quantize("quantize_rows_transposed", xs, to, [a, b, len], shape)
}

/// `xs (a, b, len)` as rows of `(b, a)`, in `shape`.
fn quantize(
    op: &'static str,
    xs: &Tensor,
    to: QuantizedType,
    [a, b, len]: [usize; 3],
    shape: Vec<usize>,
) -> Result<Tensor> {
    on_cuda!(xs => super::quantized_gpu::quantize_rows(op, xs, to, [a, b, len], shape));
    let _timer = crate::timing::op_timer::op(op);
    let xs = HostFloats::new(op, "xs", xs)?;
    let row_bytes = to.row_bytes(len);
    let mut packed = vec![0u8; a * b * row_bytes];
    by_float!(xs.dtype(), T => if len > 0 {
        let xs = xs.read_as::<T>();
        for (row, packed) in packed.chunks_exact_mut(row_bytes).enumerate() {
            let from = row % a * b + row / a;
            quantize_row(packed, &xs[from * len..(from + 1) * len], to);
        }
    });
    Tensor::from_vec(packed, shape, &Device::Cpu)
}

/// Writes, or adds if `add`, the values of packed rows to `dst`, in f32, rounded once to the dtype of `dst`; outside any graph.
///
/// # Shapes
/// `dst (.., len)`, f32, bf16 or f16, contiguous; `packed`, u8, `(.., row_bytes(len))` with the same rows.
///
/// # Errors
/// When the shapes differ from that, or a tensor has another dtype, device or layout.
pub fn dequantize_rows_into(
    dst: &Tensor,
    add: bool,
    packed: &Tensor,
    from: QuantizedType,
) -> Result<()> {
    let op = "dequantize_rows_into";
    let (rows, len) = rows_of(op, "dst", dst)?;
    let (got_rows, bytes) = rows_of(op, "packed", packed)?;
    if (got_rows, bytes) != (rows, from.row_bytes(len)) {
        bail!(
            "{op}: expected packed of {rows} rows of {} bytes for dst of {rows} rows of {len} values, got {got_rows} of {bytes}",
            from.row_bytes(len)
        )
    }
    dequantize(op, dst, add, packed, from, [1, len])
}

/// Writes, or adds if `add`, the sums of packed rows to `dst`: in f32, `dst` first and then one after the other, rounded once to the dtype of
/// `dst`; outside any graph.
///
/// # Shapes
/// `dst (.., len)`, f32, bf16 or f16, contiguous; `packed`, u8, `(summands, .., row_bytes(len))` with as many rows for each of at least one
/// summand.
///
/// # Errors
/// When the shapes differ from that, or a tensor has another dtype, device or layout.
pub fn dequantize_sum_into(
    dst: &Tensor,
    add: bool,
    packed: &Tensor,
    from: QuantizedType,
) -> Result<()> {
    let op = "dequantize_sum_into";
    let (rows, len) = rows_of(op, "dst", dst)?;
    let (got_rows, bytes) = rows_of(op, "packed", packed)?;
    let num_summed = packed.dims().first().copied().unwrap_or(0);
    if num_summed == 0 || (got_rows, bytes) != (num_summed * rows, from.row_bytes(len)) {
        bail!(
            "{op}: expected packed (summands, .., {}) with {rows} rows for each of at least one summand for dst of {rows} rows of {len} \
             values, got {:?}",
            from.row_bytes(len),
            packed.dims()
        )
    }
    dequantize(op, dst, add, packed, from, [num_summed, len])
}

/// Each row of `len` values of `dst` gets the sum of its row of each of `num_summed` summands.
fn dequantize(
    op: &'static str,
    dst: &Tensor,
    add: bool,
    packed: &Tensor,
    from: QuantizedType,
    [num_summed, len]: [usize; 2],
) -> Result<()> {
    if dst.elem_count() == 0 {
        return Ok(());
    }
    on_cuda!(dst => super::quantized_gpu::dequantize_rows(op, dst, add, packed, from, [num_summed, len]));
    let _timer = crate::timing::op_timer::op(op);
    let packed = Host::<u8>::new(op, "packed", packed)?;
    let packed = packed.read();
    if !dst.is_contiguous() {
        bail!(
            "{op}: dst must be contiguous, got strides {:?}",
            dst.stride()
        )
    }
    let row_bytes = from.row_bytes(len);
    let summand_bytes = packed.len() / num_summed;
    by_float!(dst.dtype(), T => in_place::<T>(op, "dst", dst.clone(), |dst| {
        for (row, dst) in dst.chunks_exact_mut(len).enumerate() {
            let rows = packed.chunks_exact(summand_bytes);
            let rows = rows.map(|summand| &summand[row * row_bytes..(row + 1) * row_bytes]);
            sum_rows(dst, add, &rows.collect::<Vec<_>>(), from);
        }
    }))?;
    Ok(())
}

fn quantize_row<T: Element>(packed: &mut [u8], xs: &[T], to: QuantizedType) {
    let (blocks, block_bytes) = (rows_per_chunk(BLOCK), to.block_bytes(BLOCK));
    for_each_chunk(packed, blocks * block_bytes, xs.len(), |chunk, packed| {
        let xs = &xs[(chunk * blocks * BLOCK).min(xs.len())..];
        vectorised(
            #[inline(always)]
            || {
                for (packed, xs) in packed.chunks_mut(block_bytes).zip(xs.chunks(BLOCK)) {
                    quantize_block(packed, xs, to);
                }
            },
        );
    });
}

#[inline(always)]
fn quantize_block<T: Element>(packed: &mut [u8], xs: &[T], to: QuantizedType) {
    let (scale_bytes, codes) = packed.split_at_mut(SCALE_BYTES);
    let max = lanes::max(xs, f32::abs);
    if !max.is_finite() {
        scale_bytes.copy_from_slice(&f32::NAN.to_le_bytes());
        return;
    }
    let scale = (max / to.max_code()).clamp(f32::MIN_POSITIVE, to.max_scale());
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    let inverse = 1.0 / scale;
    let code_of = |x: &T| (x.widen() * inverse + ROUNDER).to_bits() as u8;
    match to {
        QuantizedType::Int8 => {
            for (code, x) in codes.iter_mut().zip(xs) {
                *code = code_of(x);
            }
        }
        QuantizedType::Int4 => {
            let (lower, upper) = xs.split_at(xs.len().min(HALF));
            for (code, x) in codes.iter_mut().zip(lower) {
                *code = code_of(x) & 0xf;
            }
            for (code, x) in codes.iter_mut().zip(upper) {
                *code |= code_of(x) << 4;
            }
        }
    }
}

/// `dst` = the sum of packed rows, after what `dst` is if `add`.
fn sum_rows<T: Element>(dst: &mut [T], add: bool, rows: &[&[u8]], from: QuantizedType) {
    let (blocks, block_bytes) = (rows_per_chunk(BLOCK), from.block_bytes(BLOCK));
    let num_bytes = rows.iter().map(|row| row.len()).sum();
    for_each_chunk(dst, blocks * BLOCK, num_bytes, |chunk, dst| {
        vectorised(
            #[inline(always)]
            || {
                for (block, dst) in dst.chunks_mut(BLOCK).enumerate() {
                    let start = (chunk * blocks + block) * block_bytes;
                    let mut sums = [0f32; BLOCK];
                    let sums = &mut sums[..dst.len()];
                    if add {
                        for (sum, dst) in sums.iter_mut().zip(&*dst) {
                            *sum = dst.widen();
                        }
                    }
                    for (place, row) in rows.iter().enumerate() {
                        add_block(sums, add || place > 0, &row[start..], from);
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
fn add_block(dst: &mut [f32], add: bool, packed: &[u8], from: QuantizedType) {
    let (scale, codes) = packed.split_at(SCALE_BYTES);
    let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    match from {
        QuantizedType::Int8 => add_codes(dst, add, codes, scale, |code| code.cast_signed()),
        QuantizedType::Int4 => {
            let (lower, upper) = dst.split_at_mut(dst.len().min(HALF));
            add_codes(lower, add, codes, scale, |code| {
                (code << 4).cast_signed() >> 4
            });
            add_codes(upper, add, codes, scale, |code| code.cast_signed() >> 4);
        }
    }
}

#[inline(always)]
fn add_codes(dst: &mut [f32], add: bool, codes: &[u8], scale: f32, signed: impl Fn(u8) -> i8) {
    let values = codes.iter().map(|&code| f32::from(signed(code)) * scale);
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
