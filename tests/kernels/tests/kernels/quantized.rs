//! Blockwise int8 and int4 against a plain reference, bit for bit, at every alignment.

use crate::element::{Element, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Quantize<T> = unsafe extern "C" fn(*mut u8, *const T, i64, i64, i64);
type Dequantize<T> = unsafe extern "C" fn(*mut T, *const u8, i64, i64, i64, i32);

/// The kernels of a format and a type.
macro_rules! kernels {
    ($($quantize:ident $dequantize:ident $type:ty),*) => {
        unsafe extern "C" {
            $(
                fn $quantize(packed: *mut u8, src: *const $type, a: i64, b: i64, len: i64);
                fn $dequantize(
                    dst: *mut $type,
                    packed: *const u8,
                    rows: i64,
                    num_summed: i64,
                    len: i64,
                    add: i32,
                );
            )*
        }
    };
}

kernels!(
    quantize_int8_f32 dequantize_int8_f32 f32,
    quantize_int8_bf16 dequantize_int8_bf16 bf16,
    quantize_int8_f16 dequantize_int8_f16 f16,
    quantize_int4_f32 dequantize_int4_f32 f32,
    quantize_int4_bf16 dequantize_int4_bf16 bf16,
    quantize_int4_f16 dequantize_int4_f16 f16
);

/// How values are packed: the largest code, and where the code of value i of a block is.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Format {
    Int8,
    Int4,
}

impl Format {
    fn max_code(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
        }
    }

    /// Bytes of the codes of a block of `len` values.
    fn code_bytes(self, len: usize) -> usize {
        match self {
            Self::Int8 => len,
            Self::Int4 => len.min(128),
        }
    }

    /// The packed form of a row.
    fn packed(self, row: &[f64]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for block in row.chunks(256) {
            let max = block.iter().fold(0f64, |max, x| max.max(x.abs())) as f32;
            let scale = (max / self.max_code()).max(f32::MIN_POSITIVE);
            let broken = block.iter().any(|x| !x.is_finite());
            bytes.extend(if broken { f32::NAN } else { scale }.to_le_bytes());
            let inverse = 1.0 / scale;
            let code = |x: &f64| match broken {
                true => 0,
                false => ((*x as f32 * inverse).round_ties_even() as i8).cast_unsigned(),
            };
            let codes: Vec<u8> = block.iter().map(code).collect();
            bytes.extend((0..self.code_bytes(block.len())).map(|i| match self {
                Self::Int8 => codes[i],
                Self::Int4 => codes[i] & 0xf | codes.get(i + 128).map_or(0, |code| code << 4),
            }));
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn values(self, packed: &[u8], len: usize) -> Vec<f32> {
        let value = |i: usize| {
            let block = &packed[i / 256 * (4 + self.code_bytes(256))..];
            let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            let code = match (self, i % 256) {
                (Self::Int8, i) => block[4 + i].cast_signed(),
                // The lower half of a byte is moved to the upper one, from where a shift keeps the sign.
                (Self::Int4, i @ ..128) => (block[4 + i] << 4).cast_signed() >> 4,
                (Self::Int4, i) => block[4 + i - 128].cast_signed() >> 4,
            };
            f32::from(code) * scale
        };
        (0..len).map(value).collect()
    }
}

const LENGTHS: [usize; 8] = [1, 3, 64, 255, 256, 257, 1000, 2307];

/// A grid of fewer blocks than rows.
fn launch(seed: u64) -> Launch {
    Launch {
        grid: [2, 2, 1],
        seed,
        ..Launch::new(0, 64, 0)
    }
}

fn check_quantize<T: Element>(format: Format, kernel: Quantize<T>) {
    let mut rng = rng(1);
    for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 1)]) {
        for broken in [None, Some(f64::NAN), Some(f64::NEG_INFINITY)] {
            // src (a, b, len), packed (b, a, bytes).
            let [a, b] = [3, 2];
            let mut xs = random::<T>(&mut rng, a * b * len, 3.0);
            if let Some(broken) = broken {
                xs[len + len / 2] = T::from_f64(broken);
            }
            let row = |i: usize| &xs[i * len..][..len];
            let want: Vec<u8> = (0..a * b)
                .flat_map(|i| format.packed(&to_f64(row(i % a * b + i / a))))
                .collect();
            let (src, dst) = (
                Buffer::shifted(xs.len(), shift).with(&xs),
                Buffer::<u8>::new(want.len()),
            );
            let [a, b, cols] = [a, b, len].map(|size| size as i64);
            launch!(launch(len as u64), kernel(dst.ptr(), src.ptr(), a, b, cols)).unwrap();
            for (i, (got, want)) in dst.read().iter().zip(want).enumerate() {
                assert_eq!(*got, want, "{i} of {len} {shift} {broken:?} {format:?}");
            }
        }
    }
}

#[test]
fn quantize_packs_each_block() {
    check_quantize(Format::Int8, quantize_int8_f32);
    check_quantize(Format::Int8, quantize_int8_bf16);
    check_quantize(Format::Int8, quantize_int8_f16);
    check_quantize(Format::Int4, quantize_int4_f32);
    check_quantize(Format::Int4, quantize_int4_bf16);
    check_quantize(Format::Int4, quantize_int4_f16);
}

fn check_dequantize<T: Element>(format: Format, kernel: Dequantize<T>, rounded: fn(f32) -> T) {
    let mut rng = rng(2);
    for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 1)]) {
        for (num_summed, add) in [(1, 0), (1, 1), (3, 0), (3, 1)] {
            let rows = 3;
            // packed (num_summed, rows, bytes).
            let from: Vec<Vec<u8>> = (0..num_summed * rows)
                .map(|_| format.packed(&to_f64(&random::<f32>(&mut rng, len, 3.0))))
                .collect();
            let old = random::<T>(&mut rng, rows * len, 3.0);
            let mut want = Vec::new();
            for (i, old) in old.chunks(len).enumerate() {
                let mut sum: Vec<f32> = old.iter().map(|x| x.to_f64() as f32).collect();
                if add == 0 {
                    sum.fill(0.0);
                }
                for packed in from.iter().skip(i).step_by(rows) {
                    for (sum, value) in sum.iter_mut().zip(format.values(packed, len)) {
                        *sum += value;
                    }
                }
                want.extend(sum.into_iter().map(rounded));
            }
            let from = from.concat();
            let (src, dst) = (
                Buffer::shifted(from.len(), shift).with(&from),
                Buffer::shifted(old.len(), shift).with(&old),
            );
            let [rows, summed, cols] = [rows, num_summed, len].map(|size| size as i64);
            launch!(
                launch(1),
                kernel(dst.ptr(), src.ptr(), rows, summed, cols, add)
            )
            .unwrap();
            for (i, (got, want)) in dst.read().iter().zip(want).enumerate() {
                assert_eq!(
                    *got, want,
                    "{i} of {len} {shift} {num_summed} {add} {format:?}"
                );
            }
        }
    }
}

#[test]
fn dequantize_adds_rows_in_their_order() {
    check_dequantize(Format::Int8, dequantize_int8_f32, |x| x);
    check_dequantize(Format::Int8, dequantize_int8_bf16, bf16::from_f32);
    check_dequantize(Format::Int8, dequantize_int8_f16, f16::from_f32);
    check_dequantize(Format::Int4, dequantize_int4_f32, |x| x);
    check_dequantize(Format::Int4, dequantize_int4_bf16, bf16::from_f32);
    check_dequantize(Format::Int4, dequantize_int4_f16, f16::from_f32);
}
