//! Attention in bf16 against that in f32, from the same values. A GPU with cuDNN computes the first by cuDNN and the second by
//! our own kernels, so there this compares the two.

use crate::check::{
    assert_close, at_most, device, doubles, grads, in_dtype, on_each_device, random,
};
use candle_core::{DType, Result, Var};
use candle_ops::{GpuState, HeadGroups, causal_attention};

/// Probabilities and their gradients may be rounded to bf16 before the second product, as results are: to 2^-9 each.
const OUT_BOUND: f64 = 8e-3;
const GRAD_BOUND: f64 = 2e-2;

/// More than an emulated GPU has.
const LARGE_GPU_BYTES: u64 = 32 << 30;

#[test]
fn bf16_is_f32_but_for_its_roundings() -> Result<()> {
    on_each_device(|| {
        // (sequences, positions, query heads, key/value heads, head dimension)
        let mut cases = vec![
            (2, 130, 4, 1, 64),
            (1, 100, 2, 2, 128),
            (1, 70, 4, 2, 96),
            (1, 65, 2, 1, 256),
        ];
        // The length at which training on a GPU is measured; the CPU, or a GPU emulated by it, would take minutes.
        let gpu = GpuState::of(&device())?;
        if gpu.is_some_and(|gpu| gpu.total > LARGE_GPU_BYTES) {
            cases.push((1, 4096, 32, 8, 128));
            cases.push((8, 2048, 32, 8, 64));
        }
        for (b, t, heads, kv_heads, d) in cases {
            let t = if t <= 130 { at_most(70, t) } else { t };
            let (q, kv) = ((b, t, heads, d), (b, t, kv_heads, d));
            let values = [random(1, q)?, random(2, kv)?, random(3, kv)?, random(4, q)?];
            let run = |dtype: DType| {
                // Both start from values that bf16 has.
                let of = |index: usize| in_dtype(&in_dtype(&values[index], DType::BF16)?, dtype);
                let (q, k, v) = (
                    Var::from_tensor(&of(0)?)?,
                    Var::from_tensor(&of(1)?)?,
                    Var::from_tensor(&of(2)?)?,
                );
                let scale = 4.0 / (d as f32).sqrt();
                let out = causal_attention(&q, &k, &v, scale, HeadGroups::new(heads / kv_heads))?;
                let [dq, dk, dv] = grads(&out, &of(3)?, [&q, &k, &v])?;
                Ok::<_, candle_core::Error>([out.detach(), dq, dk, dv])
            };
            let (got, want) = (run(DType::BF16)?, run(DType::F32)?);
            let bounds = [OUT_BOUND, GRAD_BOUND, GRAD_BOUND, GRAD_BOUND];
            let names = ["out", "dq", "dk", "dv"];
            for (((name, bound), got), want) in names.iter().zip(bounds).zip(&got).zip(&want) {
                let what = format!("{name}, t {t} heads {heads} on {kv_heads} of {d}");
                assert_close(&what, got, &doubles(want)?, bound);
            }
        }
        Ok(())
    })
}
