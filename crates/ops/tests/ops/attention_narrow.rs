//! Attention in bf16 and f16 against that in f32, from the same values. A GPU with cuDNN computes the first by cuDNN and the second by
//! our own kernels, so there this compares the two, with cuDNN's backward pass in no fixed order and in one.

use crate::check::{
    assert_close, at_most, device, doubles, floats, grads, in_dtype, on_each_device, random,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_ops::{
    AttentionSpec, DocumentStarts, GpuSettings, GpuState, HeadGroups, causal_attention,
};

/// Probabilities and their gradients may be rounded to bf16 before the second product, as results are: to 2^-9 each. To f16 it is
/// 2^-12.
const OUT_BOUND: f64 = 8e-3;
const GRAD_BOUND: f64 = 2e-2;
const F16_SHARE: f64 = 1.0 / 8.0;

/// More than an emulated GPU has.
const LARGE_GPU_BYTES: u64 = 32 << 30;

/// Sequences, positions, query heads, key/value heads, head dimension.
type Case = (usize, usize, usize, usize, usize);

/// The window, and whether sequences are several documents.
type Seen = (Option<usize>, bool);

#[test]
fn narrow_types_are_f32_but_for_their_roundings() -> Result<()> {
    on_each_device(|| {
        let mut cases = vec![
            (2, 130, 4, 1, 64),
            (1, 100, 2, 2, 128),
            (1, 70, 4, 2, 96),
            (1, 65, 2, 1, 256),
        ];
        let gpu = GpuState::of(&device())?;
        if gpu.is_none_or(|gpu| gpu.total <= LARGE_GPU_BYTES) {
            let small = |(b, t, heads, kv_heads, d)| (b, at_most(70, t), heads, kv_heads, d);
            return cases.into_iter().map(small).try_for_each(check_windows);
        }
        // Lengths that are no multiples of cuDNN's tiles, and the one at which training on a GPU is measured; the CPU, or a GPU
        // emulated by it, would take minutes.
        for t in [129, 200, 1000] {
            cases.extend([(2, t, 8, 2, 64), (2, t, 4, 4, 128)]);
        }
        cases.extend([(1, 4096, 32, 8, 128), (8, 2048, 32, 8, 64)]);
        cases.into_iter().try_for_each(check_windows)
    })
}

/// With all positions before each, and with a window that is no multiple of any tile; in whole sequences, and in documents, some of them
/// shorter than the window.
fn check_windows(case: Case) -> Result<()> {
    for is_packed in [false, true] {
        for window in [None, Some(case.1 / 3 + 1)] {
            check(case, (window, is_packed), DType::BF16, 1.0)?;
            // Each type takes cuDNN plans of its own, of half a second.
            if window.is_some() == is_packed {
                check(case, (window, is_packed), DType::F16, F16_SHARE)?;
            }
        }
    }
    Ok(())
}

/// Of other lengths in each sequence, down to a single token.
fn documents((b, t, ..): Case) -> Result<DocumentStarts> {
    let mut starts = Vec::new();
    for row in 0..b {
        let mut start = 0;
        for len in [t / 2 + row, 1, t / 5, t] {
            let len = len.min(t - start);
            starts.extend(std::iter::repeat_n(start as u32, len));
            start += len;
        }
    }
    DocumentStarts::new(starts, (b, t))
}

/// In the form of the backward pass that is usual, and in the one that gives the same bits in each run.
fn check(case: Case, seen: Seen, narrow: DType, share: f64) -> Result<()> {
    let (_, t, heads, kv_heads, d) = case;
    let want = run(case, seen, DType::F32, narrow)?;
    let forms: &[bool] = if device().is_cpu() {
        &[false]
    } else {
        &[false, true]
    };
    for &deterministic in forms {
        GpuSettings::make_deterministic(deterministic);
        let got = run(case, seen, narrow, narrow)?;
        let bounds = [OUT_BOUND, GRAD_BOUND, GRAD_BOUND, GRAD_BOUND].map(|bound| share * bound);
        let names = ["out", "dq", "dk", "dv"];
        for (((name, bound), got), want) in names.iter().zip(bounds).zip(&got).zip(&want) {
            let what = format!(
                "{name}, {narrow:?}, t {t} heads {heads} on {kv_heads} of {d}, window and documents {seen:?}"
            );
            assert_close(&what, got, &doubles(want)?, bound);
        }
        if deterministic {
            for (first, second) in got.iter().zip(&run(case, seen, narrow, narrow)?) {
                assert!(
                    floats(first)? == floats(second)?,
                    "t {t} window and documents {seen:?}: other bits"
                );
            }
        }
    }
    Ok(())
}

/// The output, and the gradients of q, k and v.
fn run(case: Case, (window, is_packed): Seen, dtype: DType, of: DType) -> Result<[Tensor; 4]> {
    let (b, t, heads, kv_heads, d) = case;
    let (q, kv) = ((b, t, heads, d), (b, t, kv_heads, d));
    let values = [random(1, q)?, random(2, kv)?, random(3, kv)?, random(4, q)?];
    // In either dtype from values that `of` has.
    let of = |index: usize| in_dtype(&in_dtype(&values[index], of)?, dtype);
    let (q, k, v) = (
        Var::from_tensor(&of(0)?)?,
        Var::from_tensor(&of(1)?)?,
        Var::from_tensor(&of(2)?)?,
    );
    let spec = AttentionSpec {
        scale: 4.0 / (d as f32).sqrt(),
        groups: HeadGroups::new(heads / kv_heads),
        window,
        rows: is_packed
            .then(|| documents(case).map(Into::into))
            .transpose()?,
    };
    let out = causal_attention(&q, &k, &v, &spec)?;
    let [dq, dk, dv] = grads(&out, &of(3)?, [&q, &k, &v])?;
    Ok([out.detach(), dq, dk, dv])
}
