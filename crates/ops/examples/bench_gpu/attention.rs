//! Causal attention, forward and backward apart.
//!
//! A forward pass counts 4 · sequences · heads · head_dim · tokens² / 2 operations (the causal half counts once), with a window
//! tokens · window - window² / 2 instead of tokens² / 2; a backward pass 2.5 times as many, as FlashAttention's authors count
//! (arXiv:2307.08691, section 4.1).

use crate::random;
use crate::timer::secs_of_call;
use candle_core::{Device, Result, Tensor, bail};
use candle_ops::{AttentionGrad, AttentionSpec, HeadGroups, attention_backward, attention_forward};

/// What attention reads, of the sizes sequences, tokens, heads, key/value heads and head_dim.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub grad: Tensor,
    spec: AttentionSpec,
}

/// What it returns.
pub struct Outputs {
    pub out: Tensor,
    pub log_sum_exp: Tensor,
}

impl Inputs {
    pub fn new(
        device: &Device,
        [b, t, heads, kv_heads, d]: [usize; 5],
        window: Option<usize>,
    ) -> Result<Self> {
        if !heads.is_multiple_of(kv_heads) {
            bail!("expected HEADS to be a multiple of KV_HEADS, got {heads} and {kv_heads}")
        }
        let of = |heads: usize| random((b, t, heads, d), device);
        Ok(Self {
            q: of(heads)?,
            k: of(kv_heads)?,
            v: of(kv_heads)?,
            grad: of(heads)?,
            spec: AttentionSpec {
                scale: 1.0 / (d as f32).sqrt(),
                groups: HeadGroups::new(heads / kv_heads),
                window,
                documents: None,
            },
        })
    }

    pub fn forward(&self) -> Result<Outputs> {
        let (out, log_sum_exp) = attention_forward(&self.q, &self.k, &self.v, &self.spec)?;
        Ok(Outputs { out, log_sum_exp })
    }

    /// Gradients of q, k and v.
    pub fn backward(&self, outputs: &Outputs) -> Result<(Tensor, Tensor, Tensor)> {
        let pass = AttentionGrad {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            out: &outputs.out,
            log_sum_exp: &outputs.log_sum_exp,
            grad: &self.grad,
        };
        attention_backward(&pass, &self.spec)
    }
}

pub fn measure(device: &Device, sizes: [usize; 5], window: Option<usize>) -> Result<()> {
    let inputs = Inputs::new(device, sizes, window)?;
    let outputs = inputs.forward()?;
    let forward = secs_of_call(device, || inputs.forward().map(drop))?;
    let backward = secs_of_call(device, || inputs.backward(&outputs).map(drop))?;
    let [b, t, heads, _kv_heads, d] = sizes;
    let (rows, t) = ((b * heads * d) as f64, t as f64);
    let window = window.map_or(t, |window| t.min(window as f64));
    let flops = 4.0 * rows * window * (t - window / 2.0);
    for (pass, secs, flops) in [
        ("forward", forward, flops),
        ("backward", backward, 2.5 * flops),
    ] {
        println!(
            "{{\"op\": \"{pass}\", \"secs\": {secs}, \"tflops\": {}}}",
            flops / secs / 1e12
        );
    }
    Ok(())
}
