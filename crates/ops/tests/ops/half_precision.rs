//! bf16 and f16: every operation gives what it gives for the same values in f32, rounded once (on a GPU, to the error of a few
//! roundings), and writes gradients of weights in f32, unrounded. Sums of products are those of f32 but for the order in which a
//! processor adds.

use crate::attention_reference::both_passes;
use crate::check::{assert_close, device, doubles, floats, on_each_device, random, random_ids};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    AttentionSpec, HeadGroups, RopeDirection, add_into, causal_attention, cross_entropy,
    cross_entropy_grad, cross_entropy_grad_in_place, embedding, embedding_forward,
    embedding_grad_into, geglu_backward_and_output, geglu_forward, layer_norm, layer_norm_backward,
    layer_norm_forward, linear, linear_bias_grad, linear_bias_grad_into, linear_forward,
    linear_forward_add, linear_input_grad, linear_input_grad_sum, linear_weight_grad,
    linear_weight_grad_into, rms_norm, rms_norm_backward, rms_norm_forward, rope, rope_in_place,
    round_into, softmax_stats, swiglu, swiglu_backward, swiglu_backward_and_output, swiglu_forward,
};
use half::{bf16, f16};

/// Values that `narrow` holds, as f32.
fn exact(narrow: DType, seed: u64, dims: &[usize]) -> Result<Tensor> {
    random(seed, dims)?.to_dtype(narrow)?.to_dtype(F32)
}

/// Runs a test on each device, with each of the types.
fn with_each(test: impl Fn(DType) -> Result<()>) -> Result<()> {
    on_each_device(|| [DType::BF16, DType::F16].into_iter().try_for_each(&test))
}

/// A copy of the values at an address that is no multiple of 16 bytes.
fn moved(tensor: &Tensor) -> Result<Tensor> {
    let values = tensor.flatten_all()?;
    let longer = Tensor::cat(&[&values.narrow(0, 0, 1)?, &values], 0)?;
    longer
        .narrow(0, 1, values.elem_count())?
        .reshape(tensor.shape())
}

/// Asserts that `run` gives, for the inputs in `narrow`, the results it gives for them in f32: those of `dtypes` `narrow`
/// rounded once by candle, those of f32 bit by bit; and the same at any address.
#[track_caller]
fn assert_rounded_once(
    what: &str,
    narrow: DType,
    inputs: &[Tensor],
    dtypes: &[DType],
    run: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<()> {
    let rounded = inputs.iter().map(|x| x.to_dtype(narrow));
    let rounded = rounded.collect::<Result<Vec<_>>>()?;
    let moved = |inputs: &[Tensor]| inputs.iter().map(moved).collect::<Result<Vec<_>>>();
    let want = run(inputs)?;
    for (got, want) in run(&moved(inputs)?)?.iter().zip(&want) {
        assert_close(&format!("{what}, moved"), got, &doubles(want)?, 1e-6);
    }
    for inputs in [&moved(&rounded)?, &rounded] {
        assert_same_but_rounded(what, &run(inputs)?, &want, dtypes)?;
    }
    Ok(())
}

#[track_caller]
fn assert_same_but_rounded(
    what: &str,
    got: &[Tensor],
    want: &[Tensor],
    dtypes: &[DType],
) -> Result<()> {
    assert_eq!(got.len(), dtypes.len(), "{what}");
    for (i, ((got, want), dtype)) in got.iter().zip(want).zip(dtypes).enumerate() {
        assert_eq!(
            (got.dtype(), got.dims()),
            (*dtype, want.dims()),
            "{what} {i}"
        );
        if !device().is_cpu() || what == "attention" {
            // GPUs round sums of products more than once, and read attention's output in the type; attention multiplies with
            // probabilities in the type. The rest is rounded once there, too.
            let bound = match (what, *dtype) {
                ("linear" | "attention", DType::BF16) => 1e-2,
                ("linear" | "attention", DType::F16) => 1.25e-3,
                _ => 1e-5,
            };
            assert_close(&format!("{what} {i}"), got, &doubles(want)?, bound);
            continue;
        }
        if what == "linear" {
            let half_of_last_place = match *dtype {
                DType::BF16 => 2f64.powi(-8),
                DType::F16 => 2f64.powi(-11),
                _ => 0.0,
            };
            let want = doubles(want)?;
            let mean_square = want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64;
            for (got, want) in doubles(&got.to_dtype(F32)?)?.iter().zip(&want) {
                let power = want.abs().max(f64::MIN_POSITIVE).log2().floor().exp2();
                let bound = half_of_last_place * power + 1e-5 * mean_square.sqrt();
                assert!((got - want).abs() <= bound, "{what} {i}: {got} {want}");
            }
            continue;
        }
        let want = want.to_dtype(*dtype)?.to_dtype(DType::F32)?;
        assert_eq!(
            floats(&got.to_dtype(DType::F32)?)?,
            floats(&want)?,
            "{what} {i}"
        );
    }
    Ok(())
}

const F32: DType = DType::F32;

#[test]
fn linear_layers() -> Result<()> {
    with_each(|narrow| {
        for (n, num_in, num_out) in [(1, 1, 1), (127, 48, 97), (300, 130, 257)] {
            let shapes: [&[usize]; 7] = [
                &[1, n, num_in],
                &[num_out, num_in],
                &[num_out],
                &[1, n, num_out],
                &[1, n, num_out],
                &[1, n, 33],
                &[33, num_in],
            ];
            let inputs = (1..)
                .zip(shapes)
                .map(|(seed, dims)| exact(narrow, seed, dims));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let dtypes = [[narrow; 7].as_slice(), &[F32; 4]].concat();
            assert_rounded_once("linear", narrow, &inputs, &dtypes, |inputs| {
                let [x, w, bias, residual, dy, dy2, w2] = inputs else {
                    unreachable!()
                };
                let dw = Tensor::full(f32::NAN, num_out * num_in, &device())?;
                linear_weight_grad_into(&dw, false, dy, x)?;
                let twice = dw.copy()?;
                linear_weight_grad_into(&twice, true, dy, x)?;
                let db = Tensor::ones(num_out, F32, &device())?;
                linear_bias_grad_into(&db, true, dy)?;
                let sum = Tensor::ones(dy.elem_count(), F32, &device())?;
                add_into(&sum, true, dy)?;
                Ok(vec![
                    linear_forward(x, w, None)?,
                    linear_forward(x, w, Some(bias))?,
                    linear_forward_add(residual, x, w)?,
                    linear_input_grad(dy, w)?,
                    linear_input_grad_sum(&[(dy, w), (dy2, w2)])?,
                    linear_weight_grad(dy, x)?,
                    linear_bias_grad(dy)?,
                    dw,
                    twice,
                    db,
                    sum,
                ])
            })?;
        }
        Ok(())
    })
}

#[test]
fn rows() -> Result<()> {
    with_each(|narrow| {
        for (b, t, h) in [(1, 1, 5), (2, 127, 33), (3, 40, 512)] {
            let dims = [b, t, h];
            let inputs = [
                exact(narrow, 1, &dims)?,
                exact(narrow, 2, &[h])?,
                exact(narrow, 3, &dims)?,
                exact(narrow, 4, &dims)?,
                exact(narrow, 5, &[h])?,
            ];
            let norms = [narrow, narrow, narrow, F32, F32, narrow];
            let dtypes = [&[narrow, narrow, F32], &[narrow; 11][..], &norms].concat();
            assert_rounded_once("rows", narrow, &inputs, &dtypes, |inputs| {
                let [x, w, dy, up, b] = inputs else {
                    unreachable!()
                };
                let (dx, dw) = rms_norm_backward(x, w, dy, 1e-5, Some(up), true)?;
                let (alone, _) = rms_norm_backward(x, w, dy, 1e-5, None, false)?;
                let (dgate, dup) = swiglu_backward(x, up, dy)?;
                let again = swiglu_backward_and_output(x, up, dy)?;
                let geglu = geglu_backward_and_output(x, up, dy)?;
                let ys = [
                    rms_norm_forward(x, w, 1e-5)?,
                    dx,
                    dw.expect("wanted"),
                    alone,
                ];
                let (dx, sums) = layer_norm_backward(x, w, dy, 1e-5, Some(up), [true; 2])?;
                let (alone, _) = layer_norm_backward(x, w, dy, 1e-5, None, [false; 2])?;
                let [dw, db] = sums.map(|sum| sum.expect("wanted"));
                let norms = [
                    layer_norm_forward(x, w, None, 1e-5)?,
                    layer_norm_forward(x, w, Some(b), 1e-5)?,
                    dx,
                    dw,
                    db,
                    alone,
                ];
                let gates = [
                    swiglu_forward(x, up)?,
                    dgate,
                    dup,
                    again.0,
                    again.1,
                    again.2,
                ];
                let of_geglu = [geglu_forward(x, up)?, geglu.0, geglu.1, geglu.2];
                Ok([&ys[..], &gates, &of_geglu, &norms].concat())
            })?;
        }
        Ok(())
    })
}

#[test]
fn heads() -> Result<()> {
    with_each(|narrow| {
        let (b, t, hq, hkv, d) = (2, 130, 4, 2, 16);
        let (q, kv) = ([b, t, hq, d], [b, t, hkv, d]);
        let inputs = [
            exact(narrow, 1, &q)?,
            exact(narrow, 2, &kv)?,
            exact(narrow, 3, &kv)?,
            exact(narrow, 4, &q)?,
        ];
        let angles = random(5, (t, d / 2))?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let dtypes = [narrow, F32, narrow, narrow, narrow];
        assert_rounded_once("attention", narrow, &inputs, &dtypes, |inputs| {
            let [q, k, v, grad] = inputs else {
                unreachable!()
            };
            let spec = AttentionSpec::new(0.3, HeadGroups::new(hq / hkv));
            Ok(both_passes([q, k, v, grad], &spec)?.to_vec())
        })?;
        assert_rounded_once("rope", narrow, &inputs[..1], &[narrow; 3], |inputs| {
            let q = &inputs[0];
            let turned = rope_in_place(q.copy()?, &cos, &sin, RopeDirection::Forward)?;
            let back = rope_in_place(moved(q)?, &cos, &sin, RopeDirection::Backward)?;
            Ok(vec![rope(q, &cos, &sin)?, turned, back])
        })
    })
}

#[test]
fn vocabularies() -> Result<()> {
    with_each(|narrow| {
        let (n, v, h) = (130, 1301, 48);
        let mut ids = random_ids(1, n, v as u32);
        ids[3] = u32::MAX;
        let ids = Tensor::new(ids, &device())?;
        let inputs = [
            exact(narrow, 1, &[v, h])?,
            exact(narrow, 2, &[n, h])?,
            exact(narrow, 3, &[n, v])?,
        ];
        let (lse, grad) = (random(5, n)?, random(6, n)?);
        let dtypes = [narrow, F32, F32, F32, narrow, narrow];
        assert_rounded_once("vocabularies", narrow, &inputs, &dtypes, |inputs| {
            let [table, dy, logits] = inputs else {
                unreachable!()
            };
            let dtable = Tensor::ones(v * h, F32, &device())?;
            embedding_grad_into(&dtable, true, &ids, dy)?;
            Ok(vec![
                embedding_forward(table, &ids)?,
                dtable,
                softmax_stats(logits, &ids, 0)?,
                cross_entropy(logits, &ids)?,
                cross_entropy_grad(logits, &lse, &ids, 0, &grad)?,
                cross_entropy_grad_in_place(moved(logits)?, &lse, &ids, 0, 0.3)?,
            ])
        })
    })
}

#[test]
fn gradients_through_the_graph_have_the_dtype_of_their_variables() -> Result<()> {
    with_each(|narrow| {
        let var = |seed, dims: &[usize]| Var::from_tensor(&random(seed, dims)?.to_dtype(narrow)?);
        let (table, norm, weight, bias) = (
            var(1, &[50, 16])?,
            var(2, &[16])?,
            var(3, &[16, 16])?,
            var(4, &[16])?,
        );
        let ids = Tensor::from_vec(random_ids(5, 12, 50), (1, 12), &device())?;
        let angles = random(6, (12, 2))?;
        let xs = embedding(&table, &ids)?;
        let xs = rms_norm(&xs, &norm, 1e-5)?;
        let xs = layer_norm(&xs, &norm, Some(&bias), 1e-5)?;
        let xs = linear(&xs, &weight, Some(&bias))?;
        let heads = rope(&xs.reshape((1, 12, 4, 4))?, &angles.cos()?, &angles.sin()?)?;
        let heads = causal_attention(
            &heads,
            &heads,
            &heads,
            &AttentionSpec::new(0.5, HeadGroups::new(1)),
        )?;
        let ys = swiglu(&heads.reshape((12, 16))?, &xs.reshape((12, 16))?)?;
        let targets = Tensor::new(random_ids(7, 12, 16), &device())?;
        let grads = cross_entropy(&ys, &targets)?.sum_all()?.backward()?;
        for (name, var) in [
            ("table", &table),
            ("norm", &norm),
            ("weight", &weight),
            ("bias", &bias),
        ] {
            let grad = grads.get(var).expect(name);
            assert_eq!((grad.dtype(), grad.dims()), (narrow, var.dims()), "{name}");
            let squares = grad.to_dtype(F32)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
            assert!(squares > 0.0 && squares.is_finite(), "{name}");
        }
        Ok(())
    })
}

#[test]
fn mixed_dtypes_are_errors_that_name_both() -> Result<()> {
    with_each(|narrow| {
        let (x, w) = (random(1, (2, 4))?, random(2, (4, 4))?);
        let (other, row) = (w.to_dtype(narrow)?, random(3, 4)?);
        let heads = random(4, (1, 2, 2, 2))?;
        let narrow_heads = heads.to_dtype(narrow)?;
        let failures = [
            linear(&x, &other, None),
            linear_forward_add(&x.to_dtype(narrow)?, &x, &w),
            linear_input_grad(&x, &other),
            linear_weight_grad(&x, &x.to_dtype(narrow)?),
            linear(&x, &w, Some(&row.to_dtype(narrow)?)),
            rms_norm(&x.to_dtype(narrow)?, &row, 1e-5),
            layer_norm(&x, &row, Some(&row.to_dtype(narrow)?), 1e-5),
            layer_norm_backward(&x, &row, &x, 1e-5, Some(&x.to_dtype(narrow)?), [true; 2])
                .map(|(dx, _)| dx),
            swiglu(&x, &x.to_dtype(narrow)?),
            causal_attention(
                &heads,
                &narrow_heads,
                &heads,
                &AttentionSpec::new(1.0, HeadGroups::new(1)),
            ),
            linear_input_grad_sum(&[(&x, &w), (&x.to_dtype(narrow)?, &other)]),
        ];
        for (i, failure) in failures.into_iter().enumerate() {
            let message = failure.expect_err("mixed").to_string();
            for part in ["dtype", "F32", &format!("{narrow:?}")] {
                assert!(message.contains(part), "{i}: {message}");
            }
        }
        Ok(())
    })
}

/// Every upper half, with lower ones at which rounding changes: subnormal numbers, infinities and NaN are among them.
fn numbers() -> Vec<f32> {
    let lower = [
        0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001, 0xffff,
    ];
    let number = |upper| lower.map(|lower| f32::from_bits(u32::from(upper) << 16 | lower));
    (0..=u16::MAX).flat_map(number).collect()
}

/// What is in memory.
fn bits(tensor: &Tensor) -> Result<Vec<u16>> {
    Ok(match tensor.dtype() {
        DType::BF16 => tensor.to_vec1()?.into_iter().map(bf16::to_bits).collect(),
        _ => tensor.to_vec1()?.into_iter().map(f16::to_bits).collect(),
    })
}

#[test]
fn rounding_into_a_view_is_candles_rounding_and_leaves_the_rest() -> Result<()> {
    with_each(|narrow| {
        let numbers = numbers();
        let len = numbers.len();
        let values = Tensor::from_vec(numbers, len, &Device::Cpu)?;
        let want = bits(&values.to_dtype(narrow)?)?;
        let values = values.to_device(&device())?;
        let one = bits(&Tensor::ones(1, narrow, &Device::Cpu)?)?[0];
        for start in [0, 2] {
            let buffer = Tensor::ones(start + len + 1, narrow, &device())?;
            round_into(&buffer.narrow(0, start, len)?, &values)?;
            let mut got = bits(&buffer)?;
            let rest = [
                got.pop().into_iter().collect(),
                got.drain(..start).collect::<Vec<_>>(),
            ];
            assert!(rest.concat().into_iter().all(|bits| bits == one));
            assert!(got == want, "{narrow:?}");
        }
        let view = Tensor::zeros(9, narrow, &device())?;
        for (dst, values, part) in [
            (&view, &random(2, 3)?, "dst of 3 values"),
            (&view, &view.copy()?, "F32"),
            (&values, &values.copy()?, "BF16 or F16"),
        ] {
            let message = round_into(dst, values).expect_err(part).to_string();
            assert!(message.contains(part), "{message}");
        }
        Ok(())
    })
}

#[test]
fn widening_is_exact() -> Result<()> {
    with_each(|narrow| {
        let all = 0..=u16::MAX;
        let all = match narrow {
            DType::BF16 => Tensor::from_iter(all.map(bf16::from_bits), &Device::Cpu)?,
            _ => Tensor::from_iter(all.map(f16::from_bits), &Device::Cpu)?,
        };
        let dst = Tensor::zeros(all.elem_count(), F32, &device())?;
        add_into(&dst, false, &all.to_device(&device())?)?;
        for (got, want) in floats(&dst)?.into_iter().zip(floats(&all)?) {
            let both_nan = got.is_nan() && want.is_nan();
            assert!(got.to_bits() == want.to_bits() || both_nan, "{want:e}");
        }
        Ok(())
    })
}
