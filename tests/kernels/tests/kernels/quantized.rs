//! Blockwise int8 against a plain reference, bit for bit, at every alignment.

use crate::element::{Element, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Quantize<T> = unsafe extern "C" fn(*mut u8, *const T, i64, i64);
type Dequantize<T> = unsafe extern "C" fn(*mut T, *const u8, i64, i64, i64, i32);

unsafe extern "C" {
    fn quantize_int8_f32(packed: *mut u8, src: *const f32, rows: i64, len: i64);
    fn quantize_int8_bf16(packed: *mut u8, src: *const bf16, rows: i64, len: i64);
    fn quantize_int8_f16(packed: *mut u8, src: *const f16, rows: i64, len: i64);
    fn dequantize_int8_f32(
        dst: *mut f32,
        packed: *const u8,
        rows: i64,
        num_summed: i64,
        len: i64,
        add: i32,
    );
    fn dequantize_int8_bf16(
        dst: *mut bf16,
        packed: *const u8,
        rows: i64,
        num_summed: i64,
        len: i64,
        add: i32,
    );
    fn dequantize_int8_f16(
        dst: *mut f16,
        packed: *const u8,
        rows: i64,
        num_summed: i64,
        len: i64,
        add: i32,
    );
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

/// The packed form of a row.
fn packed(row: &[f64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for block in row.chunks(256) {
        let max = block.iter().fold(0f64, |max, x| max.max(x.abs())) as f32;
        let scale = (max / 127.0).max(f32::MIN_POSITIVE);
        let broken = block.iter().any(|x| !x.is_finite());
        bytes.extend(if broken { f32::NAN } else { scale }.to_le_bytes());
        let inverse = 1.0 / scale;
        let code = |x: &f64| match broken {
            true => 0,
            false => (*x as f32 * inverse).round_ties_even() as i8,
        };
        bytes.extend(block.iter().map(|x| code(x).cast_unsigned()));
    }
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn values(packed: &[u8], len: usize) -> Vec<f32> {
    let value = |i: usize| {
        let block = &packed[i / 256 * 260..];
        let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        f32::from(block[4 + i % 256].cast_signed()) * scale
    };
    (0..len).map(value).collect()
}

fn check_quantize<T: Element>(kernel: Quantize<T>) {
    let mut rng = rng(1);
    for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 1)]) {
        for broken in [None, Some(f64::NAN), Some(f64::NEG_INFINITY)] {
            let rows = 3;
            let mut xs = random::<T>(&mut rng, rows * len, 3.0);
            if let Some(broken) = broken {
                xs[len + len / 2] = T::from_f64(broken);
            }
            let rows_of_xs = xs.chunks(len);
            let want: Vec<u8> = rows_of_xs.flat_map(|row| packed(&to_f64(row))).collect();
            let (src, dst) = (
                Buffer::shifted(xs.len(), shift).with(&xs),
                Buffer::<u8>::new(want.len()),
            );
            launch!(
                launch(len as u64),
                kernel(dst.ptr(), src.ptr(), rows as i64, len as i64)
            )
            .unwrap();
            for (i, (got, want)) in dst.read().iter().zip(want).enumerate() {
                assert_eq!(*got, want, "{i} of {len} {shift} {broken:?}");
            }
        }
    }
}

#[test]
fn quantize_packs_each_block() {
    check_quantize(quantize_int8_f32);
    check_quantize(quantize_int8_bf16);
    check_quantize(quantize_int8_f16);
}

fn check_dequantize<T: Element>(kernel: Dequantize<T>, rounded: fn(f32) -> T) {
    let mut rng = rng(2);
    for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 1)]) {
        for (num_summed, add) in [(1, 0), (1, 1), (3, 0), (3, 1)] {
            let rows = 3;
            let from: Vec<Vec<u8>> = (0..rows * num_summed)
                .map(|_| packed(&to_f64(&random::<f32>(&mut rng, len, 3.0))))
                .collect();
            let old = random::<T>(&mut rng, rows * len, 3.0);
            let mut want = Vec::new();
            for (old, from) in old.chunks(len).zip(from.chunks(num_summed)) {
                let mut sum: Vec<f32> = old.iter().map(|x| x.to_f64() as f32).collect();
                if add == 0 {
                    sum.fill(0.0);
                }
                for packed in from {
                    for (sum, value) in sum.iter_mut().zip(values(packed, len)) {
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
                assert_eq!(*got, want, "{i} of {len} {shift} {num_summed} {add}");
            }
        }
    }
}

#[test]
fn dequantize_adds_rows_in_their_order() {
    check_dequantize(dequantize_int8_f32, |x| x);
    check_dequantize(dequantize_int8_bf16, bf16::from_f32);
    check_dequantize(dequantize_int8_f16, f16::from_f32);
}
