//! Blockwise int8 and int4: the error bound, broken values, sums of rows, and the same bits on every device.

use crate::check::{
    assert_same_bits, at_most, device, floats, in_dtype, on_each_device, placed, random,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::QuantizedType::{self, Int4, Int8};
use candle_ops::{
    dequantize_rows_into, dequantize_sum_into, quantize_rows, quantize_rows_transposed,
};

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const BLOCK: usize = 256;

fn max_code(q: QuantizedType) -> f32 {
    match q {
        Int8 => 127.0,
        Int4 => 7.0,
    }
}

/// On each device, in each type.
fn on_each(run: impl Fn(QuantizedType) -> Result<()>) -> Result<()> {
    on_each_device(|| [Int8, Int4].into_iter().try_for_each(&run))
}

/// The values that come back, in f32.
fn back(packed: &Tensor, shape: &[usize], q: QuantizedType) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let dst = placed(&Tensor::full(f32::NAN, len, &Device::Cpu)?)?.reshape(shape)?;
    dequantize_rows_into(&dst, false, packed, q)?;
    Ok(dst)
}

fn bytes(packed: &Tensor) -> Result<Vec<u8>> {
    packed.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()
}

fn on_the_cpu(xs: &Tensor) -> Result<Tensor> {
    xs.to_device(&Device::Cpu)
}

#[test]
fn values_are_off_by_at_most_half_a_scale() -> Result<()> {
    on_each(|q| {
        for (seed, len) in [1, 3, 64, 255, 256, 257, 1000, at_most(5001, 300_007)]
            .into_iter()
            .enumerate()
        {
            for (dtype, size) in [
                (DTYPES[0], 1.0),
                (DTYPES[1], 1e-3),
                (DTYPES[2], 1.0),
                (DTYPES[0], 1e30),
            ] {
                let xs = in_dtype(&(random(seed as u64, (3, len))? * size)?, dtype)?;
                let packed = quantize_rows(&xs, q)?;
                assert_eq!(packed.dims(), [3, q.row_bytes(len)]);
                assert_eq!(
                    bytes(&packed)?,
                    bytes(&quantize_rows(&on_the_cpu(&xs)?, q)?)?
                );
                let (got, xs) = (floats(&back(&packed, &[3, len], q)?)?, floats(&xs)?);
                let rows = xs.chunks(len).zip(got.chunks(len));
                for (xs, got) in rows.flat_map(|(xs, got)| xs.chunks(BLOCK).zip(got.chunks(BLOCK)))
                {
                    let max = xs.iter().fold(0f32, |max, x| max.max(x.abs()));
                    let scale = f64::from(max) / f64::from(max_code(q));
                    // Half a step, and the roundings of the scale, its inverse and two products of at most 127 steps.
                    let bound = scale * (0.5 + 4.0 * 127.0 * f64::from(f32::EPSILON) / 2.0);
                    for (x, got) in xs.iter().zip(got) {
                        let error = (f64::from(*x) - f64::from(*got)).abs();
                        assert!(error <= bound, "{x} came back as {got}, scale {scale}");
                    }
                }
            }
        }
        Ok(())
    })
}

#[test]
fn a_row_takes_about_a_quarter_or_an_eighth_of_its_f32_and_is_packed_alone() -> Result<()> {
    let lens = [0, 1, 4, 127, 129, 256, 257, 64 * 37];
    let sizes = |q: QuantizedType| lens.map(|len| q.row_bytes(len));
    assert_eq!(sizes(Int8), [0, 8, 8, 132, 136, 260, 268, 64 * 37 + 10 * 4]);
    assert_eq!(sizes(Int4), [0, 8, 8, 132, 132, 132, 140, 9 * 132 + 68]);
    for (q, share) in [(Int8, 0.254), (Int4, 0.129)] {
        assert!(q.row_bytes(1 << 20) as f64 <= share * 4.0 * f64::from(1 << 20));
    }
    on_each(|q| {
        for (rows, len) in [(4, 64 * 5), (2, 321), (3, 7)] {
            let xs = random(1, (rows, len))?;
            let alone: Result<Vec<Vec<u8>>> = (0..rows)
                .map(|row| bytes(&quantize_rows(&xs.get(row)?, q)?))
                .collect();
            assert_eq!(bytes(&quantize_rows(&xs, q)?)?, alone?.concat());
        }
        // Rows that change places, whole.
        for (a, b, len) in [(3, 2, 300), (1, 4, 7), (4, 1, 513)] {
            let xs = random(2, (a, b, len))?;
            let packed = quantize_rows_transposed(&xs, q)?;
            assert_eq!(packed.dims(), [b, a, q.row_bytes(len)]);
            let moved = xs.transpose(0, 1)?.contiguous()?;
            assert_eq!(bytes(&packed)?, bytes(&quantize_rows(&moved, q)?)?);
        }
        Ok(())
    })
}

#[test]
fn multiples_of_the_scale_come_back_and_ties_go_to_the_even_one() -> Result<()> {
    on_each(|q| {
        let step = 1.0 / 64.0;
        let max = max_code(q) as i32;
        let codes = (-max..=max).cycle().take(255);
        let exact: Vec<f32> = codes.map(|code| code as f32 * step).collect();
        let xs = placed(&Tensor::from_vec(exact.clone(), 255, &Device::Cpu)?)?;
        assert_eq!(floats(&back(&quantize_rows(&xs, q)?, &[255], q)?)?, exact);
        let max = max_code(q);
        let xs = [max, 0.5, 1.5, -2.5, -3.5, 5.5, 0.4].map(|x: f32| x * step);
        let even = [max, 0.0, 2.0, -2.0, -4.0, 6.0, 0.0].map(|x: f32| x * step);
        let xs = placed(&Tensor::new(&xs, &Device::Cpu)?)?;
        assert_eq!(floats(&back(&quantize_rows(&xs, q)?, &[7], q)?)?, even);
        Ok(())
    })
}

#[test]
fn zeros_stay_zeros_and_the_smallest_and_largest_numbers_finite() -> Result<()> {
    on_each(|q| {
        let xs = placed(&Tensor::zeros(300, DType::F32, &Device::Cpu)?)?;
        assert_eq!(
            floats(&back(&quantize_rows(&xs, q)?, &[300], q)?)?,
            [0.0; 300]
        );
        let tiny = f32::MIN_POSITIVE;
        for xs in [
            [tiny / 4.0, -tiny, f32::from_bits(1)],
            [f32::MAX, -1.0, f32::MIN],
        ] {
            let on_device = placed(&Tensor::new(&xs, &Device::Cpu)?)?;
            let got = floats(&back(&quantize_rows(&on_device, q)?, &[3], q)?)?;
            let scale = (f32::MAX.min(xs[0].abs().max(xs[1].abs())) / max_code(q)).max(tiny);
            for (x, got) in xs.iter().zip(got) {
                assert!(
                    (x - got).abs() <= scale * 0.5001,
                    "{x:e} came back as {got:e}"
                );
            }
        }
        Ok(())
    })
}

#[test]
fn a_broken_value_breaks_its_block_and_no_other() -> Result<()> {
    on_each(|q| {
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for dtype in DTYPES {
                for at in [0, 255, 300, 511, 599] {
                    let mut xs = floats(&random(1, 600)?)?;
                    xs[at] = broken;
                    let xs = in_dtype(&Tensor::from_vec(xs, 600, &Device::Cpu)?, dtype)?;
                    let packed = quantize_rows(&xs, q)?;
                    assert_eq!(
                        bytes(&packed)?,
                        bytes(&quantize_rows(&on_the_cpu(&xs)?, q)?)?
                    );
                    for (i, got) in floats(&back(&packed, &[600], q)?)?.iter().enumerate() {
                        assert_eq!(got.is_nan(), i / BLOCK == at / BLOCK, "{broken} {at} {i}");
                    }
                }
            }
        }
        Ok(())
    })
}

#[test]
fn rows_are_summed_in_their_order() -> Result<()> {
    on_each(|q| {
        for (len, dtype) in [
            (1000, DTYPES[0]),
            (1000, DTYPES[1]),
            (1000, DTYPES[2]),
            (257, DTYPES[0]),
        ] {
            let packed = quantize_rows(&random(1, (3, len))?, q)?;
            let rows = floats(&back(&packed, &[3, len], q)?)?;
            let start = in_dtype(&random(2, len)?, dtype)?;
            for add in [false, true] {
                // A view of a larger buffer, whose other values stay.
                let buffer = placed(&Tensor::full(7f32, len + 3, &Device::Cpu)?)?;
                let buffer = in_dtype(&buffer, dtype)?;
                let dst = buffer.narrow(0, 2, len)?;
                buffer.slice_set(&start, 0, 2)?;
                let mut want = floats(&start)?;
                for (i, want) in want.iter_mut().enumerate() {
                    let first = if add { *want + rows[i] } else { rows[i] };
                    *want = first + rows[len + i] + rows[2 * len + i];
                }
                dequantize_sum_into(&dst, add, &packed, q)?;
                let want = Tensor::from_vec(want, len, &Device::Cpu)?;
                assert_eq!(floats(&dst)?, floats(&in_dtype(&want, dtype)?)?);
                let all = floats(&buffer)?;
                assert_eq!([all[0], all[1], all[len + 2]], [7.0; 3]);

                buffer.slice_set(&start, 0, 2)?;
                dequantize_rows_into(&dst, add, &packed.get(1)?, q)?;
                let mut want = floats(&start)?;
                for (i, want) in want.iter_mut().enumerate() {
                    let value = rows[len + i];
                    *want = if add { *want + value } else { value };
                }
                let want = Tensor::from_vec(want, len, &Device::Cpu)?;
                assert_eq!(floats(&dst)?, floats(&in_dtype(&want, dtype)?)?);
            }
        }
        Ok(())
    })
}

#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    on_each(|q| {
        let len = at_most(3001, 100_003);
        let xs = random(1, (3, len))?;
        assert_same_bits(&format!("{q:?}"), || {
            let packed = quantize_rows(&xs, q)?;
            let sum = random(2, len)?;
            dequantize_sum_into(&sum, true, &packed, q)?;
            Ok(vec![packed.to_dtype(DType::F32)?, sum])
        })
    })
}

#[test]
fn parts_of_a_buffer_that_are_not_aligned() -> Result<()> {
    on_each(|q| {
        let mut packed = Vec::new();
        for dtype in DTYPES {
            let xs = in_dtype(&random(1, 1003)?, dtype)?;
            packed.push(quantize_rows(&xs.narrow(0, 1, 1000)?, q)?);
            let on_the_cpu = on_the_cpu(&xs)?.narrow(0, 1, 1000)?;
            assert_eq!(
                bytes(packed.last().expect("the last"))?,
                bytes(&quantize_rows(&on_the_cpu, q)?)?
            );
        }
        let packed = &packed[0];
        let first = placed(&Tensor::new(&[9u8], &Device::Cpu)?)?;
        let moved = Tensor::cat(&[&first, packed], 0)?.narrow(0, 1, packed.elem_count())?;
        let (got, want) = (back(&moved, &[1000], q)?, back(packed, &[1000], q)?);
        assert_eq!(floats(&got)?, floats(&want)?);
        Ok(())
    })
}

/// On a GPU a grid has at most 65535 blocks in that direction.
#[test]
fn more_rows_than_a_grid_has() -> Result<()> {
    on_each(|q| {
        let rows = 65_537;
        let xs = random(1, (rows, 1))?;
        let packed = quantize_rows(&xs, q)?;
        assert_eq!(
            bytes(&packed)?,
            bytes(&quantize_rows(&on_the_cpu(&xs)?, q)?)?
        );
        let want = Tensor::zeros((rows, 1), DType::F32, &Device::Cpu)?;
        dequantize_rows_into(&want, false, &on_the_cpu(&packed)?, q)?;
        assert_eq!(floats(&back(&packed, &[rows, 1], q)?)?, floats(&want)?);
        Ok(())
    })
}

#[test]
fn nothing() -> Result<()> {
    on_each(|q| {
        for shape in [[0, 5], [2, 0]] {
            let xs = placed(&Tensor::zeros(&shape, DType::F32, &Device::Cpu)?)?;
            let packed = quantize_rows(&xs, q)?;
            assert_eq!(packed.dims(), [shape[0], q.row_bytes(shape[1])]);
            dequantize_rows_into(&xs, true, &packed, q)?;
        }
        Ok(())
    })
}

#[test]
fn wrong_arguments() -> Result<()> {
    on_each_device(|| {
        let q = Int8;
        let says = |result: Result<()>, words: &[&str]| {
            let err = result.expect_err("an error").to_string();
            assert!(words.iter().all(|word| err.contains(word)), "{err}");
        };
        let xs = random(1, (2, 300))?;
        let packed = quantize_rows(&xs, q)?;
        let quantize = |xs: &Tensor| quantize_rows(xs, q).map(|_| ());
        says(quantize(&packed), &["quantize_rows", "xs", "BF16", "U8"]);
        let scalar = placed(&Tensor::new(1f32, &Device::Cpu)?)?;
        says(quantize(&scalar), &["quantize_rows", "scalar"]);
        let into = |dst: &Tensor, packed: &Tensor| dequantize_rows_into(dst, false, packed, q);
        let words = ["2 rows of 308 bytes", "2 rows of 300 values", "1 of 308"];
        says(into(&xs, &packed.narrow(0, 0, 1)?), &words);
        says(into(&xs.get(0)?, &packed), &["got 2 of 308"]);
        says(into(&packed, &packed), &["dequantize_rows_into"]);
        says(
            into(&packed.get(0)?.narrow(0, 0, 300)?, &packed.get(0)?),
            &["dst", "U8"],
        );
        let floats = random(2, (2, 308))?;
        says(into(&xs, &floats), &["packed", "U8", "F32"]);
        let gaps = random(3, (300, 2))?.t()?;
        says(into(&gaps, &packed), &["dst", "contiguous", "strides"]);
        let sum = |dst: &Tensor, packed: &Tensor| dequantize_sum_into(dst, true, packed, q);
        let row = xs.get(0)?;
        says(
            sum(&row, &packed.get(0)?),
            &["packed (summands, .., 308)", "[308]"],
        );
        says(
            sum(&row, &packed.narrow(0, 0, 0)?),
            &["at least one summand", "[0, 308]"],
        );
        if device().is_cuda() {
            let there = packed.to_device(&Device::Cpu)?;
            says(into(&xs, &there), &["packed", "on CUDA", "Cpu"]);
            says(
                into(&xs.to_device(&Device::Cpu)?, &packed),
                &["packed", "on the CPU", "Cuda"],
            );
        }
        Ok(())
    })
}
