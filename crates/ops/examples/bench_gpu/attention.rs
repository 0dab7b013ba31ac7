//! Causal attention, forward and backward apart.
//!
//! A forward pass counts 4 · sequences · heads · head_dim · tokens² / 2 operations (the causal half counts once), with a window
//! tokens · window - window² / 2 instead of tokens² / 2; a backward pass 2.5 times as many, as FlashAttention's authors count
//! (arXiv:2307.08691, section 4.1). Each of packed documents counts as a sequence.

use crate::random;
use crate::timer::secs_of_call;
use candle_core::{Device, Result, Tensor, bail};
use candle_ops::{
    AttentionGrad, AttentionSpec, DocumentStarts, HeadGroups, attention_backward, attention_forward,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What attention reads, of the sizes sequences, tokens, heads, key/value heads and head_dim.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub grad: Tensor,
    pub spec: AttentionSpec,
}

/// How far back a query sees.
#[derive(Clone, Copy, Default)]
pub struct Seen {
    pub window: Option<usize>,
    /// Tokens of the longest of the documents that sequences are made of; none: each is one.
    pub longest: Option<usize>,
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
        seen: Seen,
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
                window: seen.window,
                rows: seen
                    .longest
                    .map(|longest| documents((b, t), longest).map(Into::into))
                    .transpose()?,
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
            out: Some(&outputs.out),
            log_sum_exp: &outputs.log_sum_exp,
            grad: &self.grad,
        };
        attention_backward(&pass, &self.spec)
    }
}

/// Of each length up to the longest, the same in each run.
fn documents((b, t): (usize, usize), longest: usize) -> Result<DocumentStarts> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut starts = Vec::with_capacity(b * t);
    for row in 0..b {
        while starts.len() < (row + 1) * t {
            let start = starts.len() - row * t;
            let len = rng.random_range(1..=longest).min(t - start);
            starts.extend(std::iter::repeat_n(start as u32, len));
        }
    }
    DocumentStarts::new(starts, (b, t))
}

/// Scores that are seen, counted as above.
fn num_seen(spec: &AttentionSpec, (b, t): (usize, usize)) -> f64 {
    let of_one = |len: usize| {
        let len = len as f64;
        let window = spec.window.map_or(len, |window| len.min(window as f64));
        window * (len - window / 2.0)
    };
    match &spec.rows {
        Some(rows) => rows.num_pairs(spec.window) as f64,
        None => b as f64 * of_one(t),
    }
}

pub fn measure(device: &Device, sizes: [usize; 5], seen: Seen) -> Result<()> {
    let inputs = Inputs::new(device, sizes, seen)?;
    let outputs = inputs.forward()?;
    let forward = secs_of_call(device, || inputs.forward().map(drop))?;
    let backward = secs_of_call(device, || inputs.backward(&outputs).map(drop))?;
    let [b, t, heads, _kv_heads, d] = sizes;
    let flops = 4.0 * (heads * d) as f64 * num_seen(&inputs.spec, (b, t));
    let kind = if seen.longest.is_some() {
        "packed "
    } else {
        ""
    };
    for (pass, secs, flops) in [
        ("forward", forward, flops),
        ("backward", backward, 2.5 * flops),
    ] {
        println!(
            "{{\"op\": \"{kind}{pass}\", \"secs\": {secs}, \"tflops\": {}}}",
            flops / secs / 1e12
        );
    }
    Ok(())
}
