//! Forward and gradients to the rounding errors of f32.

use crate::check::{
    assert_close, check_into, doubles, floats, grads, on_each_device, random, random_var,
    rounding_error,
};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    HeldRows, LinearWeight, PackedWeight, add_into, linear, linear_bias_grad,
    linear_bias_grad_into, linear_forward, linear_forward_add, linear_input_grad,
    linear_input_grad_sum, linear_of_few_rows, linear_weight_grad, linear_weight_grad_into,
};

/// `a (m, k)` times `b (k, n)`.
fn product(a: &[f64], b: &[f64], (m, k, n): (usize, usize, usize)) -> Vec<f64> {
    let element = |i: usize| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum();
    (0..m * n).map(element).collect()
}

fn transpose(a: &[f64], cols: usize) -> Vec<f64> {
    (0..cols)
        .flat_map(|c| a.iter().skip(c).step_by(cols).copied())
        .collect()
}

/// One linear layer, its inputs in f32 and what f64 makes of them.
struct Case {
    what: String,
    x: Var,
    w: Var,
    bias: Var,
    dy: Tensor,
    /// (n, in, out)
    sizes: (usize, usize, usize),
    y: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
    db: Vec<f64>,
}

fn cases() -> Result<Vec<Case>> {
    let shapes = [
        (1, 1, 1, 1),
        (1, 1, 64, 97),
        (2, 1, 48, 97),
        (1, 2, 128, 33),
        (1, 127, 64, 33),
        (1, 127, 97, 1),
        (3, 100, 16, 300),
        (1, 1000, 97, 130),
        (1, 3, 33, 32001),
        // Deeper than a block of any product.
        (1, 37, 1031, 40),
    ];
    shapes.into_iter().map(case).collect()
}

fn case((b, t, num_in, num_out): (usize, usize, usize, usize)) -> Result<Case> {
    let (x, w) = (
        random_var(1, (b, t, num_in))?,
        random_var(2, (num_out, num_in))?,
    );
    let (bias, dy) = (random_var(3, num_out)?, random(4, (b, t, num_out))?);
    let n = b * t;
    let (x64, w64, dy64) = (doubles(&x)?, doubles(&w)?, doubles(&dy)?);
    Ok(Case {
        what: format!("{n} x {num_in} -> {num_out}"),
        y: product(&x64, &transpose(&w64, num_in), (n, num_in, num_out)),
        dx: product(&dy64, &w64, (n, num_out, num_in)),
        dw: product(&transpose(&dy64, num_out), &x64, (num_out, n, num_in)),
        db: product(&vec![1.0; n], &dy64, (1, n, num_out)),
        sizes: (n, num_in, num_out),
        x,
        w,
        bias,
        dy,
    })
}

impl Case {
    /// Asserts that the result of a product is off by no more than the rounding of each of its `terms`.
    #[track_caller]
    fn check(&self, what: &str, got: &Tensor, want: &[f64], terms: usize) {
        let bound = rounding_error(terms);
        assert_close(&format!("{what} of {}", self.what), got, want, bound);
    }

    fn with_bias(&self) -> Result<Vec<f64>> {
        let bias = doubles(&self.bias)?;
        Ok(plus(&self.y, bias.iter().cycle()))
    }
}

fn plus<'a>(a: &[f64], b: impl IntoIterator<Item = &'a f64>) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[test]
fn matches_the_reference() -> Result<()> {
    on_each_device(|| {
        for case in cases()? {
            let Case { x, w, bias, dy, .. } = &case;
            let (n, num_in, num_out) = case.sizes;
            for bias in [None, Some(bias)] {
                let want = if bias.is_some() {
                    case.with_bias()?
                } else {
                    case.y.clone()
                };
                let y = linear(x, w, bias.map(|bias| bias.as_tensor()))?;
                assert_eq!(y.dims(), dy.dims());
                case.check("y", &y, &want, num_in + 1);
                let [dx, dw] = grads(&y, dy, [x, w])?;
                case.check("dx", &dx, &case.dx, num_out);
                case.check("dw", &dw, &case.dw, n);
                if let Some(bias) = bias {
                    let [db] = grads(&y, dy, [bias])?;
                    case.check("db", &db, &case.db, n);
                }
            }
        }
        Ok(())
    })
}

#[test]
fn pieces_match_the_reference() -> Result<()> {
    on_each_device(|| {
        for case in cases()? {
            let Case { x, w, bias, dy, .. } = &case;
            let (n, num_in, num_out) = case.sizes;
            let y = linear_forward(x, w, Some(bias))?;
            assert!(!y.track_op());
            case.check("linear_forward", &y, &case.with_bias()?, num_in + 1);
            let residual = random(5, dy.shape())?;
            let want = plus(&case.y, &doubles(&residual)?);
            let y = linear_forward_add(&residual, x, w)?;
            case.check("linear_forward_add", &y, &want, num_in + 1);

            case.check(
                "linear_input_grad",
                &linear_input_grad(dy, w)?,
                &case.dx,
                num_out,
            );
            let (dims, other_out) = ([&dy.dims()[..2], &[33]].concat(), 33);
            let (dy2, w2) = (random(6, dims)?, random(7, (other_out, num_in))?);
            let other = product(&doubles(&dy2)?, &doubles(&w2)?, (n, other_out, num_in));
            let dx = linear_input_grad_sum(&[(dy, w), (&dy2, &w2)])?;
            let want = plus(&case.dx, &other);
            // Of a single value the terms may cancel, and are rounded all the same.
            let squares = |values: &Tensor| doubles(&values.sqr()?);
            let terms = plus(
                &product(&squares(dy)?, &squares(w)?, (n, num_out, num_in)),
                &product(&squares(&dy2)?, &squares(&w2)?, (n, other_out, num_in)),
            );
            let size = |squares: Vec<f64>| squares.iter().sum::<f64>().sqrt();
            let cancelled = size(terms) / size(want.iter().map(|value| value.powi(2)).collect());
            let bound = rounding_error(num_out + other_out) * cancelled.max(1.0);
            let what = format!("linear_input_grad_sum of {}", case.what);
            assert_close(&what, &dx, &want, bound);

            case.check(
                "linear_weight_grad",
                &linear_weight_grad(dy, x)?,
                &case.dw,
                n,
            );
            case.check("linear_bias_grad", &linear_bias_grad(dy)?, &case.db, n);
            let bound = rounding_error(n + 1);
            let what = format!("linear_weight_grad_into of {}", case.what);
            check_into(&what, &case.dw, bound, |dst, add| {
                linear_weight_grad_into(dst, add, dy, x)
            })?;
            let what = format!("linear_bias_grad_into of {}", case.what);
            check_into(&what, &case.db, bound, |dst, add| {
                linear_bias_grad_into(dst, add, dy)
            })?;
            check_into("add_into", &doubles(x)?, rounding_error(1), |dst, add| {
                add_into(dst, add, x)
            })?;
            assert_eq!(dx.dims(), x.dims());
            assert!(linear_forward_add(&x.narrow(1, 0, 0)?, x, w).is_err());
            let wrong = random(9, (other_out, num_in + 1))?;
            assert!(linear_input_grad_sum(&[(dy, w), (&dy2, &wrong)]).is_err());
        }
        assert!(linear_input_grad_sum(&[]).is_err());
        Ok(())
    })
}

#[test]
fn reads_views_that_are_not_contiguous() -> Result<()> {
    on_each_device(|| {
        let (x, w) = (random(1, (7, 5))?, random(2, (9, 3))?);
        let (x, w) = (x.t()?, w.t()?.narrow(1, 1, 7)?);
        let want = linear_forward(&x.contiguous()?, &w.contiguous()?, None)?;
        assert_close("y", &linear_forward(&x, &w, None)?, &doubles(&want)?, 0.0);
        Ok(())
    })
}

/// The values that rows hold, of weights that are held in each form.
fn held(weight: &Tensor, form: HeldRows) -> Result<(Tensor, Tensor)> {
    let blocks = match form {
        HeldRows::Floats => {
            let held = weight.to_dtype(DType::BF16)?;
            return Ok((held.clone(), held.to_dtype(DType::F32)?));
        }
        HeldRows::Q8_0 => GgmlDType::Q8_0,
        HeldRows::Q4K => GgmlDType::Q4K,
    };
    let packed = QTensor::quantize(weight, blocks)?;
    let bytes = packed.data()?.into_owned();
    let rows = weight.dim(0)?;
    let shape = (rows, bytes.len() / rows.max(1));
    let held = Tensor::from_vec(bytes, shape, &Device::Cpu)?;
    Ok((held, packed.dequantize(&Device::Cpu)?))
}

#[test]
fn few_rows_are_multiplied_with_what_weights_hold_and_each_alone() -> Result<()> {
    for form in [HeldRows::Floats, HeldRows::Q8_0, HeldRows::Q4K] {
        for (num_in, num_out) in [(256, 1), (512, 7), (1792, 300)] {
            let weight = Tensor::randn(0f32, 1.0, (num_out, num_in), &Device::Cpu)?;
            let (held, values) = held(&weight, form)?;
            let xs = Tensor::randn(0f32, 1.0, (2, 8, num_in), &Device::Cpu)?;
            let bias = Tensor::randn(0f32, 1.0, num_out, &Device::Cpu)?;
            let residual = Tensor::randn(0f32, 1.0, (2, 8, num_out), &Device::Cpu)?;
            let product = |xs: &Tensor, bias, residual| -> Result<Tensor> {
                let ys = linear_of_few_rows(xs, &held, form, bias, residual)?;
                Ok(ys.expect("few rows"))
            };
            let [plain, with_bias, with_residual] = [
                product(&xs, None, None)?,
                product(&xs, Some(&bias), None)?,
                product(&xs, None, Some(&residual))?,
            ];
            let all = product_in_f64(&xs, &values)?;
            for (got, added) in [
                (&with_bias, bias.broadcast_as((2, 8, num_out))?),
                (&with_residual, residual.clone()),
                (&plain, residual.zeros_like()?),
            ] {
                let want = (&all + added.to_dtype(DType::F64)?)?;
                let off = (got.to_dtype(DType::F64)? - want)?.abs()?.flatten_all()?;
                let off = off.max(0)?.to_scalar::<f64>()?;
                assert!(
                    off < 1e-6 * num_in as f64,
                    "{form:?} {num_in} {num_out}: {off}"
                );
            }
            // As many rows as are summed at once, more, and numbers that are cut into these.
            for (row, count) in [(0, 1), (5, 1), (6, 2), (1, 3), (2, 4), (0, 5), (0, 8)] {
                let alone = product(&xs.get(1)?.narrow(0, row, count)?, None, None)?;
                let beside = plain.get(1)?.narrow(0, row, count)?;
                assert_eq!(alone.to_vec2::<f32>()?, beside.to_vec2::<f32>()?);
            }
            let narrow = xs.to_dtype(DType::BF16)?;
            let got = product(&narrow, None, None)?;
            let want = product(&narrow.to_dtype(DType::F32)?, None, None)?;
            let want = want.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
            let got = got.to_dtype(DType::F32)?;
            let flat = |ys: Tensor| ys.flatten_all()?.to_vec1::<f32>();
            assert_eq!(flat(got)?, flat(want)?);
            let many = Tensor::zeros((17, num_in), DType::F32, &Device::Cpu)?;
            assert!(linear_of_few_rows(&many, &held, form, None, None)?.is_none());
            let both = linear_of_few_rows(&xs, &held, form, Some(&bias), Some(&residual));
            assert!(both.unwrap_err().to_string().contains("bias ("));
        }
    }
    let bytes = Tensor::zeros((3, 33), DType::U8, &Device::Cpu)?;
    let xs = Tensor::zeros((1, 32), DType::F32, &Device::Cpu)?;
    let cut = linear_of_few_rows(&xs, &bytes, HeldRows::Q8_0, None, None);
    assert!(
        cut.unwrap_err()
            .to_string()
            .contains("34 for each 32 values")
    );
    Ok(())
}

/// `xs W^T` in f64.
fn product_in_f64(xs: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let weight = weight.to_dtype(DType::F64)?.t()?;
    xs.to_dtype(DType::F64)?.broadcast_matmul(&weight)
}

/// Whether products with weights read them packed: with AVX-512.
fn is_packed() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// A packed weight changes no bit, whatever its type, whether products are worth it or not; and when it has changed and is forgotten.
#[test]
fn packed_weights_give_the_bits_of_others() -> Result<()> {
    let sizes = [
        (3, 40, 50),
        (40, 30, 50),
        (129, 97, 130),
        (64, 2100, 33),
        (1000, 192, 65),
    ];
    for (seed, (n, num_in, num_out)) in sizes.into_iter().enumerate() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let random =
                |i, shape: (usize, usize)| random(10 * seed as u64 + i, shape)?.to_dtype(dtype);
            let (weight, other) = (random(1, (num_out, num_in))?, random(2, (num_out, num_in))?);
            let (x, dy) = (random(3, (n, num_in))?, random(4, (n, num_out))?);
            let residual = random(5, (n, num_out))?;
            let packed = PackedWeight::new((num_out, num_in), dtype);
            let bytes = PackedWeight::num_bytes((num_out, num_in), dtype);
            // Twice, of 16 bits for each value at least.
            let least = 2 * 2 * weight.elem_count();
            assert_eq!(bytes > 0, packed.is_some());
            assert!(bytes == 0 || bytes >= least, "{bytes} of {least}");
            assert_eq!(packed.is_some(), is_packed(), "{dtype:?}");
            let check = |what: &str| -> Result<()> {
                let results = |weight: LinearWeight<'_>| -> Result<[Vec<f32>; 4]> {
                    let sum = LinearWeight::input_grad_sum(&[
                        (&dy, weight),
                        (&dy, LinearWeight::from(&other)),
                        (&residual, weight),
                    ]);
                    Ok([
                        floats(&weight.forward(&x, None)?)?,
                        floats(&weight.forward_add(&residual, &x)?)?,
                        floats(&weight.input_grad(&dy)?)?,
                        floats(&sum?)?,
                    ])
                };
                let plain = LinearWeight::from(&weight);
                let packed = packed.as_ref();
                let got = results(LinearWeight { packed, ..plain })?;
                assert!(
                    got == results(plain)?,
                    "{what}: {n} x {num_in} -> {num_out}, {dtype:?}"
                );
                Ok(())
            };
            for what in ["first", "again"] {
                check(what)?;
            }
            weight.slice_set(&other, 0, 0)?;
            if let Some(packed) = &packed {
                packed.forget();
            }
            check("changed")?;
        }
    }
    Ok(())
}
