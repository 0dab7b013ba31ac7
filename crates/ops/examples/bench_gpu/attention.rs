//! Causal attention, forward and backward apart.
//!
//! A forward pass counts 4 · sequences · heads · tokens² · head_dim / 2 operations (the causal half counts once), a backward
//! pass 2.5 times as many, as FlashAttention's authors count (arXiv:2307.08691, section 4.1).

use crate::random;
use crate::timer::secs_of_call;
use candle_core::{Device, Result, Tensor, bail};
use candle_ops::{AttentionGrad, HeadGroups, attention_backward, attention_forward};

/// What attention reads, of the sizes sequences, tokens, heads, key/value heads and head_dim.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub grad: Tensor,
    scale: f32,
    groups: HeadGroups,
}

/// What it returns.
pub struct Outputs {
    pub out: Tensor,
    pub log_sum_exp: Tensor,
}

impl Inputs {
    pub fn new(device: &Device, [b, t, heads, kv_heads, d]: [usize; 5]) -> Result<Self> {
        if !heads.is_multiple_of(kv_heads) {
            bail!("expected HEADS to be a multiple of KV_HEADS, got {heads} and {kv_heads}")
        }
        let of = |heads: usize| random((b, t, heads, d), device);
        Ok(Self {
            q: of(heads)?,
            k: of(kv_heads)?,
            v: of(kv_heads)?,
            grad: of(heads)?,
            scale: 1.0 / (d as f32).sqrt(),
            groups: HeadGroups::new(heads / kv_heads),
        })
    }

    pub fn forward(&self) -> Result<Outputs> {
        let (out, log_sum_exp) =
            attention_forward(&self.q, &self.k, &self.v, self.scale, self.groups)?;
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
        attention_backward(&pass, self.scale, self.groups)
    }
}

pub fn measure(device: &Device, sizes: [usize; 5]) -> Result<()> {
    let inputs = Inputs::new(device, sizes)?;
    let outputs = inputs.forward()?;
    let forward = secs_of_call(device, || inputs.forward().map(drop))?;
    let backward = secs_of_call(device, || inputs.backward(&outputs).map(drop))?;
    let [b, t, heads, _kv_heads, d] = sizes;
    let flops = 2.0 * (b * heads * t * t * d) as f64;
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
