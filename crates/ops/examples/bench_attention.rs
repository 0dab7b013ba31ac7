//! Causal attention, forward and backward, on random numbers: one JSON line with the median time.
//!
//! `cargo run --release -p candle-ops --features cuda --example bench_attention -- cuda 1 4096 32 8 128`, the arguments being device,
//! sequences, tokens, query heads, key/value heads and head_dim; bf16. A pass counts 4 · sequences · heads · tokens² · head_dim / 2
//! operations forward (the causal half counts once) and 2.5 times as many backward, as FlashAttention's authors count
//! (arXiv:2307.08691, section 4.1).

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::{AttentionGrad, DeviceChoice, HeadGroups, attention_backward, attention_forward};
use std::time::Instant;

const WARM_UP: usize = 2;
const REPETITIONS: usize = 10;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, sizes @ ..] = arguments.as_slice() else {
        bail!("expected arguments: DEVICE SEQUENCES TOKENS HEADS KV_HEADS HEAD_DIM")
    };
    let sizes: Vec<usize> = sizes
        .iter()
        .map(|size| size.parse().map_err(candle_core::Error::wrap))
        .collect::<Result<_>>()?;
    let [b, t, heads, kv_heads, d] = sizes[..] else {
        bail!(
            "expected 5 sizes, SEQUENCES TOKENS HEADS KV_HEADS HEAD_DIM, got {}",
            sizes.len()
        )
    };
    if kv_heads == 0 || heads % kv_heads != 0 {
        bail!("expected HEADS to be a multiple of KV_HEADS, got {heads} and {kv_heads}")
    }
    let device = device.parse::<DeviceChoice>()?.open()?;
    let mut secs = Vec::with_capacity(REPETITIONS);
    let pass = Pass::new(&device, [b, t, heads, kv_heads, d])?;
    for repetition in 0..WARM_UP + REPETITIONS {
        device.synchronize()?;
        let start = Instant::now();
        pass.run()?;
        device.synchronize()?;
        if repetition >= WARM_UP {
            secs.push(start.elapsed().as_secs_f64());
        }
    }
    secs.sort_by(f64::total_cmp);
    let median = secs[REPETITIONS / 2];
    let flops = 3.5 * 2.0 * (b * heads * t * t * d) as f64;
    println!(
        "{{\"secs\": {median}, \"min_secs\": {}, \"tflops\": {}}}",
        secs[0],
        flops / median / 1e12
    );
    Ok(())
}

struct Pass {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    scale: f32,
    groups: HeadGroups,
}

impl Pass {
    fn new(device: &Device, [b, t, heads, kv_heads, d]: [usize; 5]) -> Result<Self> {
        let random = |heads: usize| {
            let values = Tensor::randn(0f32, 1.0, (b, t, heads, d), &Device::Cpu)?;
            values.to_dtype(DType::BF16)?.to_device(device)
        };
        let groups = HeadGroups {
            size: heads / kv_heads,
            offset: 0,
        };
        Ok(Self {
            q: random(heads)?,
            k: random(kv_heads)?,
            v: random(kv_heads)?,
            grad: random(heads)?,
            scale: 1.0 / (d as f32).sqrt(),
            groups,
        })
    }

    fn run(&self) -> Result<()> {
        let Self {
            q,
            k,
            v,
            grad,
            scale,
            groups,
        } = self;
        let (out, log_sum_exp) = attention_forward(q, k, v, *scale, *groups)?;
        let pass = AttentionGrad {
            q,
            k,
            v,
            out: &out,
            log_sum_exp: &log_sum_exp,
            grad,
        };
        attention_backward(&pass, *scale, *groups)?;
        Ok(())
    }
}
