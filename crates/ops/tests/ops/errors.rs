//! What the operations say about arguments that do not fit.

use crate::check::{device, on_each_device, random, random_var};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{
    AttentionSpec, DocumentStarts, HeadGroups, add_into, causal_attention, cross_entropy,
    cross_entropy_grad, embedding, embedding_grad_into, layer_norm, layer_norm_backward, linear,
    linear_weight_grad, rms_norm, rope, softmax_stats, swiglu, with_backward,
};
use std::fmt::Debug;

#[track_caller]
fn assert_says<T: Debug>(result: Result<T>, parts: &[&str]) {
    let message = result.expect_err("the arguments do not fit").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

#[test]
fn shapes() -> Result<()> {
    on_each_device(|| {
        let x = random(1, (2, 3))?;
        assert_says(
            rms_norm(&x, &random(2, 4)?, 1e-6),
            &["rms_norm", "[2, 3]", "[4]"],
        );
        let (row, bias) = (random(2, 3)?, random(3, 4)?);
        assert_says(
            layer_norm(&x, &bias, None, 1e-6),
            &["layer_norm", "[2, 3]", "[4]"],
        );
        assert_says(
            layer_norm(&x, &row, Some(&bias), 1e-6),
            &["layer_norm", "bias (3)", "[4]"],
        );
        let back = |dy, residual| layer_norm_backward(&x, &row, dy, 1e-6, residual, [true; 2]);
        for (got, what) in [
            (back(&row, None), "the gradient"),
            (back(&x, Some(&row)), "residual"),
        ] {
            assert_says(
                got.map(|(dx, _)| dx),
                &["layer_norm", what, "[2, 3]", "[3]"],
            );
        }
        assert_says(
            swiglu(&x, &random(2, (3, 2))?),
            &["swiglu", "[2, 3]", "[3, 2]"],
        );
        assert_says(
            linear(&x, &random(2, (5, 4))?, None),
            &["linear", "(.., 4)", "[2, 3]"],
        );
        assert_says(
            linear(&x, &random(2, (5, 3))?, Some(&random(3, 4)?)),
            &["linear", "bias (5)", "[4]"],
        );
        assert_says(
            linear_weight_grad(&x, &random(2, (3, 3))?),
            &["leading", "[2, 3]", "[3, 3]"],
        );
        let heads = random(1, (1, 4, 2, 6))?;
        let table = random(2, (5, 3))?;
        assert_says(
            rope(&heads, &table, &table),
            &["rope", "[4, 3]", "[5, 3]", "hint: "],
        );
        let odd = random(1, (1, 4, 2, 5))?;
        assert_says(rope(&odd, &table, &table), &["rope", "even", "5"]);
        let other = random(1, (1, 3, 2, 6))?;
        assert_says(
            causal_attention(
                &heads,
                &other,
                &other,
                &AttentionSpec::new(1.0, HeadGroups::new(1)),
            ),
            &["causal_attention", "[1, 4, 2, 6]", "[1, 3, 2, 6]"],
        );
        assert_says(
            embedding(&random(1, 3)?, &Tensor::new(&[1u32], &device())?),
            &["embedding", "[3]"],
        );
        let (ids, empty) = (Tensor::new(&[1u32, 2], &device())?, random(1, (2, 0))?);
        assert_says(
            embedding_grad_into(&random(2, 5)?, false, &ids, &empty).map(|()| empty),
            &["embedding", "rows of 0", "5 values"],
        );
        let row = random(1, 2)?;
        assert_says(
            linear(&x, &row, None),
            &["linear", "weight (out, in)", "[2]"],
        );
        assert_says(
            rope(&x, &table, &table),
            &["rope", "xs (b, t, h, d)", "[2, 3]"],
        );
        assert_says(
            causal_attention(
                &x,
                &heads,
                &heads,
                &AttentionSpec::new(1.0, HeadGroups::new(1)),
            ),
            &["causal_attention", "q [2, 3]"],
        );
        let ids = Tensor::new(&[1u32], &device())?;
        assert_says(
            cross_entropy(&row, &ids),
            &["cross_entropy", "logits (n, v)", "[2]"],
        );
        assert_says(
            softmax_stats(&row, &ids, 0),
            &["softmax_stats", "logits (n, v)", "[2]"],
        );
        let row = random(1, 2)?;
        assert_says(
            cross_entropy_grad(&x, &row, &ids, 0, &row),
            &["targets (2)", "[1]"],
        );
        Ok(())
    })
}

#[test]
fn head_groups() -> Result<()> {
    on_each_device(|| {
        let (q, k) = (random(1, (1, 4, 5, 6))?, random(2, (1, 4, 2, 6))?);
        let call = |size, offset| {
            causal_attention(
                &q,
                &k,
                &k,
                &AttentionSpec::new(1.0, HeadGroups { size, offset }),
            )
        };
        assert_says(
            call(2, 0),
            &["query head 4 reads key/value head", "= 2", "there are 2"],
        );
        assert_says(call(0, 0), &["at least 1, got 0"]);
        assert_says(call(3, 3), &["less than the group size 3, got 3"]);
        assert!(call(3, 1).is_ok());
        Ok(())
    })
}

#[test]
fn a_window_of_nothing() -> Result<()> {
    on_each_device(|| {
        let x = random(1, (1, 4, 2, 6))?;
        let spec = AttentionSpec {
            window: Some(0),
            ..AttentionSpec::new(1.0, HeadGroups::new(1))
        };
        assert_says(
            causal_attention(&x, &x, &x, &spec),
            &["a window must be at least 1", "got 0", "hint: None"],
        );
        Ok(())
    })
}

#[test]
fn documents_that_do_not_fit() -> Result<()> {
    let new = DocumentStarts::new;
    assert_says(new(vec![0; 7], (2, 4)), &["8 values", "got 7"]);
    let what = "token 2 of sequence 1 has its document's start at";
    let starts = |third| vec![0, 0, 2, 2, 0, 1, third, 1];
    for third in [0, 3, u32::MAX] {
        let start = third.to_string();
        let expected = "expected 2, as the first of one, or 1";
        assert_says(new(starts(third), (2, 4)), &[what, &start, expected]);
    }
    assert_says(
        new(vec![1], (1, 1)),
        &["token 0", "expected 0", "the first"],
    );
    new(vec![], (0, 4))?;
    let documents = Some(new(starts(1), (2, 4))?);
    on_each_device(|| {
        let x = random(1, (1, 8, 2, 6))?;
        let spec = AttentionSpec {
            rows: documents.clone().map(Into::into),
            ..AttentionSpec::new(1.0, HeadGroups::new(1))
        };
        assert_says(
            causal_attention(&x, &x, &x, &spec),
            &["the documents of (1, 8)", "got those of (2, 4)"],
        );
        Ok(())
    })
}

#[test]
fn targets_outside_the_vocabulary() -> Result<()> {
    let targets = Tensor::new(&[1u32, 7], &Device::Cpu)?;
    assert_says(
        cross_entropy(&random(1, (2, 7))?, &targets),
        &["cross_entropy", "target 7", "vocabulary of 7", "hint: "],
    );
    Ok(())
}

#[test]
fn dtypes() -> Result<()> {
    let x = random(1, (2, 2))?;
    let (wide, long) = (x.to_dtype(DType::F64)?, x.to_dtype(DType::I64)?);
    assert_says(
        rms_norm(&wide, &x.get(0)?, 1e-6),
        &["rms_norm", "xs", "F32", "F64", "Cpu", "hint: "],
    );
    let row = x.get(0)?;
    assert_says(
        layer_norm(&wide, &row, None, 1e-6),
        &["layer_norm", "xs", "F32", "F64", "Cpu", "hint: "],
    );
    assert_says(
        layer_norm(&x, &row, Some(&wide.get(0)?), 1e-6),
        &["layer_norm", "bias", "F64"],
    );
    assert_says(swiglu(&x, &wide), &["swiglu", "up", "F64"]);
    assert_says(linear(&wide, &wide, None), &["linear", "xs", "F64"]);
    assert_says(embedding(&x, &long), &["embedding", "ids", "U32", "I64"]);
    assert_says(
        cross_entropy(&x, &long.get(0)?),
        &["cross_entropy", "targets", "U32", "I64"],
    );
    Ok(())
}

#[test]
fn tensors_on_two_devices() -> Result<()> {
    on_each_device(|| {
        if device().is_cpu() {
            return Ok(());
        }
        let (x, w, row) = (random(1, (4, 4))?, random(2, (4, 4))?, random(3, 4)?);
        let there = [&x, &w, &row].map(|tensor| tensor.to_device(&Device::Cpu));
        let [cpu_x, cpu_w, cpu_row] = there;
        let (cpu_x, cpu_w, cpu_row) = (cpu_x?, cpu_w?, cpu_row?);
        let ids = Tensor::new(&[1u32, 0, 2, 3], &Device::Cpu)?;
        let gpu_says = ["on CUDA", "Cpu", "hint: "];
        assert_says(linear(&x, &cpu_w, None), &gpu_says);
        assert_says(rms_norm(&x, &cpu_row, 1e-6), &gpu_says);
        assert_says(layer_norm(&x, &row, Some(&cpu_row), 1e-6), &gpu_says);
        assert_says(swiglu(&x, &cpu_w), &gpu_says);
        assert_says(embedding(&w, &ids), &gpu_says);
        assert_says(cross_entropy(&x, &ids), &gpu_says);
        assert_says(add_into(&x, true, &cpu_x).map(|()| x.clone()), &gpu_says);
        let cpu_says = ["on the CPU", "Cuda", "hint: "];
        assert_says(linear(&cpu_x, &w, None), &cpu_says);
        assert_says(rms_norm(&cpu_x, &row, 1e-6), &cpu_says);
        assert_says(layer_norm(&cpu_x, &cpu_row, Some(&row), 1e-6), &cpu_says);
        assert_says(linear_weight_grad(&cpu_x, &x), &cpu_says);
        let graph = with_backward([random_var(1, 2)?.as_tensor()], cpu_row, "mixed", |_| {
            Ok([None])
        });
        assert_says(graph, &["mixed", "the inputs are on CUDA"]);
        let wide = x.to_dtype(DType::F64)?;
        assert_says(swiglu(&wide, &wide), &["gate", "F64", "hint: "]);
        let wide = random(5, (1, 2, 1, 257))?;
        assert_says(
            causal_attention(
                &wide,
                &wide,
                &wide,
                &AttentionSpec::new(1.0, HeadGroups::new(1)),
            ),
            &["heads of at most 256, got 257"],
        );
        Ok(())
    })
}
